"""What a server says of itself over HTTP: small pages that are right, for tests to bend."""

from __future__ import annotations

from typing import Any, Final

from tests.session.ports import Page, page

READ_TTL: Final = 300.0
WRITE_TTL: Final = 600.0


def status_page(**changes: Any) -> Page:
    """/status of a server without models; keywords replace or add fields, None included."""
    status: dict[str, Any] = {
        "is_healthy": True,
        "chunk_size": 4,
        "storage_manager": {
            "l1_manager": {
                "memory_total_bytes": 2**20,
                "read_ttl_seconds": READ_TTL,
                "write_ttl_seconds": WRITE_TTL,
            }
        },
        "registered_non_cuda_instance_ids": [],
        "non_cuda_context_meta": {},
        "cache_context_meta": {},
    }
    return page({**status, **changes})


def config_page(**changes: Any) -> Page:
    """/config of a server in the right mode; keywords replace or add fields of `mp`."""
    mp: dict[str, Any] = {
        "chunk_size": 4,
        "supported_transfer_mode": "auto",
        "transport": "zmq",
        "shm_name": "",
        "instance_id": "server-1",
        "worker_registration_grace_seconds": 3600.0,
    }
    return page({"mp": {**mp, **changes}})


def server_pages(release: str = "0.5.6", **status: Any) -> dict[str, Page]:
    """All pages of one release."""
    config_path = "/conf" if release == "0.5.0" else "/config"
    return {"/lmc_version": page(release), config_path: config_page(), "/status": status_page(**status)}
