"""The flags of evaluations."""

from collections.abc import Callable
from dataclasses import dataclass

from mm_utils.arguments import arg, load_own


@dataclass
class EvaluationArguments:
    """Evaluations: re-ranking, and evaluators of your own."""

    rerank_top_k: int = arg(
        10,
        "Also measure retrieval after the fusion head reorders the first K candidates of every query; 0 = do not.",
        decides="report",
    )
    evaluators: str | None = arg(
        None,
        "Evaluators of your own, module.function[,module.function]: docs/objectives.md#what-you-can-attach.",
        decides="report",
    )

    def __post_init__(self) -> None:
        self.own_evaluators()  # complain now, not after the data is loaded

    def own_evaluators(self) -> list[Callable[..., dict[str, float]]]:
        """Return the functions that `--evaluators` names."""
        names = [name.strip() for name in (self.evaluators or "").split(",") if name.strip()]
        return [load_own(name, "--evaluators") for name in names]
