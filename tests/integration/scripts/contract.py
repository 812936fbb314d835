"""The contract's snippet with its two URLs from the command line and token lists of whole chunks.

    python contract.py URL HTTP_URL

The first list's 512 tokens must be cached. Prints the retrieved shape, then what `store` said.
"""

import sys

import lmcache_sdk.kvcache as lmc_sdk

ctx = lmc_sdk.connect(
    url=sys.argv[1],
    http_url=sys.argv[2],
    model_name="Qwen/Qwen3-8B",
)
kv = lmc_sdk.retrieve(ctx, tokens=list(range(1, 513)))  # [2, L, hit_tokens, D] or None
assert kv is not None
kv[0] = -kv[0]
ok = lmc_sdk.store(ctx, kv=kv, tokens=list(range(4, 516)))
lmc_sdk.close(ctx)
print(list(kv.shape), ok)
