"""The model that the engine serves and its start options. Immutable."""

from typing import Literal

from msgspec import Struct


class ModelSpec(Struct, frozen=True, kw_only=True):
    """A served model, by vLLM's own options."""

    root: str = "sim-model"
    """The model's path or repository."""
    served_names: tuple[str, ...] = ()
    """The names that requests may use; the first is the one in answers; () is the root alone."""
    max_model_len: int = 8192
    api: Literal["vllm", "ollama", "tgi", "triton", "tensorrt_llm"] = "vllm"
    """The engine whose API it has beside the pages."""
    runner: Literal["generate", "pooling"] = "generate"
    """`generate`: chat and completions. `pooling`: embeddings and rerank."""
    auto_tool_choice: bool = False
    """Whether `tool_choice: auto` calls the first tool (--enable-auto-tool-choice)."""
    reasoning: Literal["", "reasoning", "reasoning_content"] = ""
    """The key of the reasoning that chats begin with (--reasoning-parser; releases differ); "": none."""
    media_tokens: int = 0
    """Tokens of an image, audio or file part; 0: a text model that rejects them."""
    cache_block: int = 0
    """Tokens per block of the prefix cache (--enable-prefix-caching); 0: there is none."""
    dimensions: int = 384
    """The length of an embedding."""
    api_key: str = ""
    """The bearer key of /v1 paths; "": none."""

    def __post_init__(self) -> None:
        if not self.root or "" in self.served_names:
            raise ValueError("a model name is not empty")
        if self.dimensions < 1 or self.media_tokens < 0:
            raise ValueError("dimensions is at least 1, media_tokens at least 0")

    @property
    def names(self) -> tuple[str, ...]:
        """All names that requests may use."""
        return self.served_names or (self.root,)

    @property
    def name(self) -> str:
        """The name in answers."""
        return self.names[0]
