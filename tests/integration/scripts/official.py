"""A program written for the official module functions, positional arguments and all; only its import was changed.

python official.py URL HTTP_URL MODEL FIRST_TOKEN
"""

import sys

# was: from lmcache.sdk.kvcache import close, connect, retrieve, store
from lmcache_sdk.kvcache import close, connect, retrieve, store

source = list(range(int(sys.argv[4]), int(sys.argv[4]) + 600))
target = [token + 100_000 for token in source]

context = connect(sys.argv[1], sys.argv[2], sys.argv[3], 30.0)
try:
    kv = retrieve(context, source)
    if kv is None:
        sys.exit("miss")
    _, layers, hit, width = kv.shape
    moved = store(context, kv.flip(0), target[:hit], "moved")
    back = retrieve(context, target, "moved")
    print(layers, hit, width, moved is True, back is not None and back.shape == kv.shape, retrieve(context, target))
finally:
    close(context)
