"""What vLLM loads by name: the connector, once this release is known to be readable.

vLLM asks for the class while it makes its configuration, before any model is loaded,
whether or not it then asks the class anything.
"""

from __future__ import annotations

from vllm_ctx_offload.adapters.releases import SUPPORTED_TEXT
from vllm_ctx_offload.errors import ConfigError

try:
    from vllm_ctx_offload.adapters.vllm_api import check_release
    from vllm_ctx_offload.connector import CtxOffloadConnector
except ImportError as error:
    raise ConfigError(
        f"CtxOffloadConnector: this vLLM lacks what the connector needs ({error}); "
        f"install one of the supported releases, {SUPPORTED_TEXT}."
    ) from error

__all__ = ["CtxOffloadConnector"]

check_release()
