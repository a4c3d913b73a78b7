"""Report an evaluation of retrieval: recalls on the screen, all figures with their intervals in a file."""

from accelerate import Accelerator

from mm_utils.evaluation.metrics import half_widths
from mm_utils.evaluation.retrieval import RetrievalEvaluator
from mm_utils.run.finish import recall_lines
from mm_utils.run.start import report_metrics


def report_retrieval(
    accelerator: Accelerator,
    evaluator: RetrievalEvaluator,
    metrics: dict[str, float],
    medium: str,
    split_name: str,
    folder: str | None,
) -> None:
    """On the main process, log recalls as a run's summary has them, and write all metrics.

    Args:
        metrics: what the evaluator returned.
        medium, split_name: the kind of media, and of what split.
        folder: where to write `metrics.json`; None for nowhere.
    """
    if accelerator.is_main_process and evaluator.split is not None:
        shown = {f"eval_{name}": value for name, value in metrics.items()}
        lines = recall_lines(shown, evaluator.split, medium, f"the {split_name} split")
        report_metrics(accelerator, lines, metrics | half_widths(evaluator.directions), folder)
