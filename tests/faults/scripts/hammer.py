"""One of several processes that store and read the same sequences, each in another order.

    python -m tests.faults.scripts.hammer URL HTTP_URL MODEL INDEX FIRST_TOKENS

A sequence is two chunks that start with a token of the JSON list FIRST_TOKENS. Prints a count of each outcome as JSON.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter

import lmcache_sdk.kvcache as lmc_sdk
from tests.faults.worlds import values_of
from tests.integration.cases import CHUNK
from tests.integration.patterns import same_bytes


def main() -> None:
    url, http_url, model, index = sys.argv[1:5]
    firsts = json.loads(sys.argv[5])
    random.Random(int(index)).shuffle(firsts)
    seen = Counter(exact=0, wrong=0, missed=0)
    with lmc_sdk.connect(url, http_url, model, 60.0) as ctx:
        for first in firsts:
            tokens = [first, *range(1, 2 * CHUNK)]
            kv = values_of(ctx.server_version, model, len(tokens), first)
            ctx.store(kv, tokens)
            found = ctx.retrieve(tokens)
            if found is None:
                seen["missed"] += 1
            else:
                seen["exact" if same_bytes(found, kv) else "wrong"] += 1
    print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    main()
