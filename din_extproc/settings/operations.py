"""`operations:`, what nodes are asked for beside the operations that are built in, in the same form.

Rule: nothing that is built in, or that the gateway answers itself, can be taken over.
"""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from din_extproc.domain.request import BUILT_IN, BodyKind, Metering, Operation, OperationSpec, index_by_path
from din_extproc.settings.document import Document
from din_extproc.settings.section import OneOrMany, Section, one_or_many

Engine = Literal["vllm", "sglang", "tgi", "ollama", "llamacpp", "tensorrt_llm", "triton"]
PoolEngine = Literal[Engine, "openai", "azure_openai", "anthropic"]
"""Engines, and providers of remote APIs."""
OperationPath = Annotated[str, Field(pattern=r"^(/[A-Za-z0-9._~-]+)+$", max_length=128)]
_FieldName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
_Fields = Annotated[tuple[_FieldName, ...], OneOrMany]
_EventType = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
_ANSWERED_HERE = ("/v1/models", "/v1/usage", "/v1/responses")
"""Paths that the gateway answers itself, with all that is under them."""
_MIB = 1 << 20


class OperationSection(Section):
    """One operation, under its canonical path: the one at which nodes are asked."""

    engines: Annotated[tuple[PoolEngine, ...], BeforeValidator(one_or_many), Field(min_length=1)]
    """Engines that have it in their OpenAI interface. A pool of another engine never gets it."""
    method: Literal["POST", "PUT"] = "POST"
    paths: Annotated[tuple[OperationPath, ...], OneOrMany] = ()
    """Further paths that mean the same."""
    body: Literal["json", "multipart"] = "json"
    body_limit_mib: Annotated[int, Field(ge=1, le=1024)] | None = None
    """The largest body. None, and at most: `envoy.body_limit_mib`."""
    model: _FieldName = "model"
    """The key of the JSON, or the part of the form, that holds the model's name."""
    prompt: _Fields = ()
    """The keys or parts that hold the prompt, by which its tokens are estimated; `messages` are those of a chat."""
    limits: _Fields = ()
    """The keys that limit the output's tokens; the first with a positive number applies."""
    metering: Literal["tokens", "prompt", "request", "seconds", "images"] = "request"
    """The unit that it is charged by; see the page on operations."""
    ends: Annotated[tuple[_EventType, ...], OneOrMany] = ()
    """Types of the event that ends a stream, beside `[DONE]` and a `finish_reason`."""
    begins_soon: bool = False
    """Answers begin at once, so that `timeouts.first_byte_s` of the pool applies to whole ones too."""

    def operation(self, path: str) -> Operation:
        """For `domain/`."""
        spec = OperationSpec(
            method=self.method,
            paths=self.paths,
            body=BodyKind[self.body.upper()],
            body_limit=None if self.body_limit_mib is None else self.body_limit_mib * _MIB,
            model=self.model,
            prompt=self.prompt,
            limits=self.limits,
            metering=Metering[self.metering.upper()],
            ends=self.ends,
            begins_soon=self.begins_soon,
            engines=frozenset(self.engines),
        )
        return Operation.define(path, spec)


OwnOperations = dict[OperationPath, OperationSection]


def make_operations_table(
    sections: Mapping[str, OperationSection], document: Document, health_paths: frozenset[str] = frozenset()
) -> Mapping[str, Operation]:
    """Return every operation by every path that means it. Paths that are taken are reported, those of health checks too."""
    if not sections:
        return BUILT_IN
    own = {path: section.operation(path) for path, section in sections.items()}
    owners = dict.fromkeys(BUILT_IN, "a built-in operation") | dict.fromkeys(own, "another operation")
    for path, operation in own.items():
        if path in BUILT_IN or path in health_paths or _is_answered_here(path):
            document.report(("operations", path), f"{path} is built in", "choose another path", at_key=True)
        for index, other in enumerate(operation.spec.paths):
            owner = "the gateway itself" if other in health_paths or _is_answered_here(other) else owners.get(other)
            if owner is not None:
                document.report(("operations", path, "paths", index), f"{other} belongs to {owner}", "choose another path, or leave it out")
            owners[other] = "another operation"
    return {**index_by_path(own.values()), **BUILT_IN}


def _is_answered_here(path: str) -> bool:
    return any(path == ours or path.startswith(ours + "/") for ours in _ANSWERED_HERE)
