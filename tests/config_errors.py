"""What an operator reads when a configuration stops the start."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_ctx_offload.config import parse_config
from vllm_ctx_offload.errors import ConfigError

WHERE = "kv_connector_extra_config"


def sentence(extra_config: dict[Any, Any]) -> str:
    """Returns the error that stops the start: one line, one sentence."""
    with pytest.raises(ConfigError) as raised:
        parse_config(extra_config)
    text = str(raised.value)
    assert "\n" not in text
    assert text[-1] in ".?"
    assert len(text) < 400
    return text
