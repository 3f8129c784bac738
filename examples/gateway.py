"""A gateway that says which tenant a request belongs to.

The connector believes what a request says, so whoever authenticates clients has to say
it. This one knows API keys, passes requests on to vLLM, and writes
`kv_transfer_params` anew: the tenant is that of the key, a few hints may stay, and all
else that the client has sent there is dropped. Clients must not reach vLLM around it.

    echo '{"sk-acme-1": "acme", "sk-zeta-1": "zeta"}' > keys.json
    python examples/gateway.py --keys keys.json --upstream http://localhost:8000
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import StreamingResponse
from starlette.background import BackgroundTask

PATHS = ("completions", "chat/completions", "responses", "messages")
# Hints that a client may give. What they can do is bounded by the tenant's account.
HINTS = ("session", "priority", "ttl_s", "expected_reuse_s", "release", "receipt")
HINTS += ("store", "load")  # to opt out; a tenant's own switches can't be overruled


def with_tenant(body: Mapping[str, Any], tenant: str) -> dict[str, Any]:
    """Returns the request with the tenant set, whatever the client has said."""
    params = body.get("kv_transfer_params")
    sent = params.get("ctx") if isinstance(params, dict) else None
    sent = sent if isinstance(sent, dict) else {}
    ctx = {name: sent[name] for name in HINTS if name in sent}
    # To part tenants in the device's cache too, set body["cache_salt"] here.
    return {**body, "kv_transfer_params": {"ctx": {**ctx, "tenant": tenant}}}


def make_app(keys: Mapping[str, str], vllm: httpx.AsyncClient) -> FastAPI:
    """Returns the application: `keys` maps API keys to tenants."""
    app = FastAPI()

    def tenant_of(request: Request) -> str:
        key = request.headers.get("x-api-key", "")  # as clients of Anthropic's API
        if not key:
            key = request.headers.get("authorization", "").removeprefix("Bearer ")
        if key not in keys:
            raise HTTPException(401, "unknown API key")
        return keys[key]

    @app.get("/v1/models")
    async def models(request: Request) -> StreamingResponse:
        tenant_of(request)
        return await pass_on(vllm, vllm.build_request("GET", "/v1/models"))

    @app.post("/v1/{path:path}")
    async def forward(path: str, request: Request) -> StreamingResponse:
        tenant = tenant_of(request)
        if path not in PATHS:
            raise HTTPException(404)
        try:
            body = await request.json()
        except ValueError:
            raise HTTPException(400, "no JSON") from None
        if not isinstance(body, dict):
            raise HTTPException(400, "no JSON object")
        body = with_tenant(body, tenant)
        return await pass_on(vllm, vllm.build_request("POST", f"/v1/{path}", json=body))

    return app


async def pass_on(vllm: httpx.AsyncClient, request: httpx.Request) -> StreamingResponse:
    """Returns vLLM's answer to a request as it comes."""
    try:
        answer = await vllm.send(request, stream=True)
    except httpx.TransportError as error:
        raise HTTPException(502, "vLLM does not answer") from error
    return StreamingResponse(
        answer.aiter_bytes(),
        answer.status_code,
        media_type=answer.headers.get("content-type"),
        background=BackgroundTask(answer.aclose),
    )


def main() -> None:
    """Serves until it is interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--keys", type=Path, required=True, help="JSON: key to tenant")
    parser.add_argument("--upstream", default="http://localhost:8000")
    parser.add_argument("--port", type=int, default=9000)
    args = parser.parse_args()
    vllm = httpx.AsyncClient(base_url=args.upstream, timeout=None)
    uvicorn.run(make_app(json.loads(args.keys.read_text()), vllm), port=args.port)


if __name__ == "__main__":
    main()
