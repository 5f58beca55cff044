"""One calibration per physical model: what prompts of that model are weighed with, and what their real counts teach.

Rule: bounded by the models of the configuration; an unconfigured name is weighed with the averages of all models.
"""

from collections.abc import Callable, Mapping

from msgspec.structs import replace

from din_extproc.intent.calibration import Calibration, update_calibration
from din_extproc.intent.estimate import TokenCalibrator

_GENERAL = TokenCalibrator()


class TokenCalibrators:
    """The gauges of one worker.

    Args:
        model_of: The physical model that a name, as clients write it, stands for first; None when it stands for nothing.
    """

    __slots__ = ("_by_model", "_changed", "_media", "model_of")

    def __init__(self, model_of: Callable[[str], str | None]) -> None:
        self.model_of = model_of
        self._by_model: dict[str, TokenCalibrator] = {}
        self._changed: set[str] = set()
        self._media: dict[str, TokenCalibrator] = {}
        """Of models whose media cost something else than usual, before anything is learned."""

    def set_media_tokens(self, tokens: Mapping[str, int]) -> None:
        """Set the tokens of one image, audio or file, by physical model; models without an entry have the usual number."""
        self._media = {model: TokenCalibrator(media_tokens=cost) for model, cost in tokens.items() if cost != _GENERAL.media_tokens}
        self._by_model = {
            model: replace(calibrator, media_tokens=self._make_calibrator(model).media_tokens)
            for model, calibrator in self._by_model.items()
        }

    def for_name(self, name: str) -> TokenCalibrator:
        """For a request that asks for this name."""
        model = self.model_of(name)
        return _GENERAL if model is None else self.for_model(model)

    def for_model(self, model: str) -> TokenCalibrator:
        """For a physical model."""
        return self._by_model.get(model) or self._make_calibrator(model)

    def learn(self, model: str, features: tuple[float, ...], fixed: int, prompt_tokens: int) -> None:
        """The engine counted a prompt that was estimated from these features."""
        calibrator = self.for_model(model)
        self._by_model[model] = replace(calibrator, calibration=update_calibration(calibrator.calibration, features, fixed, prompt_tokens))
        self._changed.add(model)

    def take_changes(self) -> dict[str, Calibration]:
        """Return the factors learned since the last call, by model."""
        changed, self._changed = self._changed, set()
        return {model: self.for_model(model).calibration for model in changed}

    def apply(self, calibrations: Mapping[str, Calibration]) -> None:
        """Adopt the calibrations that another process has learned."""
        for model, calibration in calibrations.items():
            self._by_model[model] = replace(self.for_model(model), calibration=calibration)

    def _make_calibrator(self, model: str) -> TokenCalibrator:
        return self._media.get(model, _GENERAL)
