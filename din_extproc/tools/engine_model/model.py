"""Which model the engine pretends to serve, and what it was started with. Nothing here changes while it runs."""

from typing import Literal

from msgspec import Struct


class ModelSpec(Struct, frozen=True, kw_only=True):
    """A served model, in the words of vLLM's own options."""

    root: str = "sim-model"
    """The model's path or repository."""
    served_names: tuple[str, ...] = ()
    """The names that requests may use, the first is the one it answers with; () is the root alone."""
    max_model_len: int = 8192
    api: Literal["vllm", "ollama", "tgi", "triton", "tensorrt_llm"] = "vllm"
    """Whose paths it has beside the pages."""
    runner: Literal["generate", "pooling"] = "generate"
    """`generate`: chat and completions. `pooling`: embeddings and rerank."""
    auto_tool_choice: bool = False
    """Started with --enable-auto-tool-choice: `tool_choice: auto` calls the first tool."""
    reasoning: Literal["", "reasoning", "reasoning_content"] = ""
    """Started with --reasoning-parser: chats begin with thoughts, under this key (newer and older releases differ); "": none."""
    media_tokens: int = 0
    """Tokens of an image, audio or file part; 0: a text model that refuses them."""
    dimensions: int = 384
    """Length of an embedding."""
    api_key: str = ""
    """The bearer key that /v1 paths ask for; "" asks for none."""

    def __post_init__(self) -> None:
        if not self.root or "" in self.served_names:
            raise ValueError("a model name is not empty")
        if self.dimensions < 1 or self.media_tokens < 0:
            raise ValueError("dimensions is at least 1, media_tokens at least 0")

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that requests may use."""
        return self.served_names or (self.root,)

    @property
    def name(self) -> str:
        """The name that answers carry."""
        return self.names[0]
