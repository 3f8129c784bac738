"""vllm-ctx-offload: a KV-cache offloading connector for vLLM that knows its tenants."""

from __future__ import annotations

__all__ = ["CONNECTOR_NAME", "__version__", "register"]

__version__ = "0.1.0"

CONNECTOR_NAME = "CtxOffloadConnector"


def register() -> None:
    """Makes `CtxOffloadConnector` known to vLLM's connector factory.

    The entry point in the group `vllm.general_plugins`: vLLM calls it in the API
    server, the engine core and every worker. May be called any number of times,
    imports neither torch nor the connector, and never raises.
    """
    import logging

    try:
        from vllm_ctx_offload.memory import publish_default_pool_bytes

        publish_default_pool_bytes()
        # The one import of vLLM outside the adapter: the adapter's base classes would
        # pull torch and the whole connector package into every process.
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        if CONNECTOR_NAME not in KVConnectorFactory._registry:  # noqa: SLF001 - no public query
            KVConnectorFactory.register_connector(
                CONNECTOR_NAME, "vllm_ctx_offload.entry", CONNECTOR_NAME
            )
    except Exception as error:  # noqa: BLE001 - a plugin must not stop vLLM's start
        logging.getLogger(__name__).warning(
            "%s was not registered with vLLM: %s", CONNECTOR_NAME, error
        )
