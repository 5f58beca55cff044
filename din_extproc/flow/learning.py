"""Learns from finished exchanges for the next decisions: the token counts of prompts and the lengths of answers."""

from typing import Protocol

from din_extproc.domain.usage import ExchangeRecord, Outcome

_SAMPLES_PER_SECOND = 20
"""Of each tenant and model: under load, learning from every exchange would cost more than it improves."""


class PromptLearner(Protocol):
    """Learns the token counts of prompts."""

    def learn(self, model: str, features: tuple[float, ...], fixed: int, prompt_tokens: int) -> None:
        """The engine counted a prompt that was estimated from these features."""


class OutputLearner(Protocol):
    """Learns the usual length of answers."""

    def learn(self, tenant: str, model: str, completion_tokens: int) -> None:
        """An answer of so many tokens was completed."""


class ExchangeLearner:
    """Passes a sample of finished exchanges to the learners.

    Args:
        prompts: Gets the actual size of prompts.
        outputs: Gets the actual size of answers.
    """

    __slots__ = ("_outputs", "_prompts", "_samples", "_second")

    def __init__(self, prompts: PromptLearner, outputs: OutputLearner) -> None:
        self._prompts = prompts
        self._outputs = outputs
        self._second = 0
        self._samples: dict[tuple[str, str], int] = {}
        """Taken in that second, by tenant and model."""

    def on_exchange(self, record: ExchangeRecord) -> None:
        """Learn from a finished exchange, unless enough was learned for its tenant and model in this second."""
        usage = record.usage
        if usage.estimated or not usage.prompt_tokens:
            return
        second = int(record.started_at)
        if second != self._second:
            self._second = second
            self._samples.clear()
        key = record.tenant, record.model
        samples = self._samples.get(key, 0)
        if samples >= _SAMPLES_PER_SECOND:
            return
        self._samples[key] = samples + 1
        if record.features:
            self._prompts.learn(record.model, record.features, record.fixed, usage.prompt_tokens)
        if record.outcome is Outcome.COMPLETED:
            answers = 1 if record.tags is None else record.tags.answers
            self._outputs.learn(record.tenant, record.model, -(-usage.completion_tokens // answers))
