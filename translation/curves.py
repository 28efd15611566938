"""What TensorBoard shows of a run: `tensorboard --logdir runs`."""

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from toolbox.command_line import note
from toolbox.files import reason
from translation.attention import draw_example

LOG_EVERY = 20  # updates between two points


def open_tensorboard(folder: Path, first: int):
    """A writer of curves whose next point is update `first`; None where tensorboard is not installed.

    Points from `first` on that are there already, of updates that were lost, are cut off. OSError where
    nothing can be written.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(folder, purge_step=first)


@contextlib.contextmanager
def quiet_thread() -> Iterator[None]:
    """Within: TensorBoard's thread prints no traceback of an OSError; the next call raises it as well."""
    usual = threading.excepthook
    threading.excepthook = lambda args: None if isinstance(args.exc_value, OSError) else usual(args)
    try:
        yield
    finally:
        threading.excepthook = usual


class Curves:
    """A run's curves; without a writer, every call does nothing. The first that fails is the last."""

    def __init__(self, writer):
        self.writer = writer
        self.restart()

    @contextlib.contextmanager
    def optional(self) -> Iterator[None]:
        """Within: where nothing can be written, the run goes on without its curves."""
        try:
            yield
        except OSError as error:
            self.writer = None
            note(f"note: tensorboard cannot be written ({reason(error)}); the run goes on without curves")

    def restart(self) -> None:
        """Forget the updates since the last point: validation lies between, or the point is drawn."""
        self.totals, self.start = 0, time.perf_counter()

    def add_update(self, update: int, counted: Tensor, lr: float, norm: Tensor) -> None:
        """counted [2]: loss and tokens, of which the points are means; norm: of the gradient."""
        if self.writer is None:
            return
        self.totals = self.totals + counted
        if update % LOG_EVERY == 0:
            loss, tokens = self.totals.tolist()
            speed = tokens / (time.perf_counter() - self.start)
            points = dict(loss=loss / tokens, lr=lr, gradient_norm=norm.item(), tokens_per_second=speed)
            with self.optional():
                for name, value in points.items():
                    self.writer.add_scalar(f"train/{name}", value, update)
            self.restart()

    def add_epoch(self, row: dict, model, tokenizer, line: str) -> None:
        """Validation's numbers; with BLEU also where the model looks while it translates the line."""
        if self.writer is None:
            return
        with self.optional():
            self.writer.add_scalar("validation/loss", row["val_loss"], row["updates"])
            if row["bleu"] is not None:
                self.writer.add_scalar("validation/bleu", row["bleu"], row["updates"])
                with contextlib.suppress(ImportError):  # no matplotlib, no picture
                    figure = draw_example(model, tokenizer, line, beam=1)
                    self.writer.add_figure("validation/attention", figure, row["updates"])
            self.writer.flush()

    def close(self) -> None:
        if self.writer is not None:
            with self.optional():
                self.writer.close()
