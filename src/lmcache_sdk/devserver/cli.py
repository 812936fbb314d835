"""The command line: starts a server, says where it is, and waits to be told to end."""

from __future__ import annotations

import argparse
import os
import signal
import threading
from collections.abc import Sequence

from lmcache_sdk.devserver.engines import PlayedEngine
from lmcache_sdk.devserver.server import DevServer
from lmcache_sdk.devserver.settings import DEFAULT_L1_NBYTES, TRANSFER_MODES
from lmcache_sdk.errors import KVCacheSDKError
from lmcache_sdk.layout import dtype_from_name
from lmcache_sdk.protocol import DIALECTS

MIB = 2**20


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line; argparse ends the process on a wrong one."""
    parser = argparse.ArgumentParser(
        prog="python -m lmcache_sdk.devserver",
        description="An imitation of the LMCache multiprocess server for development and tests.",
    )
    add = parser.add_argument
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=5555, help="message port; 0 takes a free one")
    add("--http-port", type=int, default=9000, help="HTTP port; 0 takes a free one")
    add("--shm-name", default="", metavar="NAME", help="share the pool as /dev/shm/lmcache_l1_pool_NAME; else inline")
    add("--speak", default="0.5.6", choices=list(DIALECTS), help="the release whose wire it speaks")
    add("--chunk-size", type=int, default=256, help="tokens per chunk")
    add("--l1-size-mb", type=int, default=DEFAULT_L1_NBYTES // MIB, help="size of the pool")
    add("--supported-transfer-mode", default="auto", choices=TRANSFER_MODES)
    add("--read-ttl", type=float, default=300.0, metavar="SECONDS")
    add("--write-ttl", type=float, default=600.0, metavar="SECONDS")
    add("--session-ttl", type=float, default=600.0, metavar="SECONDS")
    add("--grace", type=float, default=3600.0, metavar="SECONDS", help="patience with an instance that never pinged")
    add("--reap", type=float, default=120.0, metavar="SECONDS", help="patience with one that did; 0 reaps nobody")
    add("--api-key", help="guard HTTP with a key (0.5.7)")
    engine = parser.add_argument_group("a played engine")
    add = engine.add_argument
    add("--model", help="its model's name")
    add("--layers", type=int, default=4)
    add("--kv-heads", type=int, default=2)
    add("--head-dim", type=int, default=64)
    add("--dtype", default="bfloat16")
    add("--world-size", type=int, default=1)
    form = engine.add_mutually_exclusive_group()
    form.add_argument("--planes", type=int, choices=(1, 2), default=2, help="1 is the same as --mla")
    form.add_argument("--mla", action="store_true", help="one plane, one latent head")
    form.add_argument("--fused", action="store_true", help="keys and values of a head side by side in one plane")
    return parser.parse_args(arguments)


def played_engines(told: argparse.Namespace) -> list[PlayedEngine]:
    """The engine that the command line asks for, if any."""
    if told.model is None:
        return []
    mla = told.mla or told.planes == 1
    return [
        PlayedEngine(
            model_name=told.model,
            num_layers=told.layers,
            num_kv_heads=1 if mla else told.kv_heads,
            head_dim=told.head_dim,
            dtype=dtype_from_name(told.dtype),
            form="MLA" if mla else "FUSED" if told.fused else "NHD",
            world_size=told.world_size,
        )
    ]


def make_server(told: argparse.Namespace) -> DevServer:
    """The server that the command line asks for."""
    return DevServer(
        models=played_engines(told),
        speak=told.speak,
        host=told.host,
        port=told.port,
        http_port=told.http_port,
        shm_name=told.shm_name,
        chunk_size=told.chunk_size,
        l1_size_bytes=told.l1_size_mb * MIB,
        supported_transfer_mode=told.supported_transfer_mode,
        read_ttl=told.read_ttl,
        write_ttl=told.write_ttl,
        session_ttl=told.session_ttl,
        grace=told.grace,
        reap=told.reap,
        api_key=told.api_key,
    )


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs a server until SIGTERM or SIGINT."""
    told = parse(arguments)
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    try:
        with make_server(told) as server:
            os.write(1, f"ready url={server.url} http_url={server.http_url}\n".encode())
            ended.wait()
    except (KVCacheSDKError, OSError) as error:
        os.write(2, f"devserver: {error}\n".encode())
        return 1
    return 0
