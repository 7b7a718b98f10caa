# SPDX-License-Identifier: Apache-2.0
"""forebay.Progress: what a script shows of its training."""

from __future__ import annotations

import shutil
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from ._metrics import RATE_NAMES
from ._report import size
from .errors import usage_error

if TYPE_CHECKING:
    from ._optimizer import ForebayOptimizer

REWRITE_S = 0.5  # between two states of a line that is written over
LINE_S = 10.0  # between two lines


class Progress:
    """A line on stderr about the training, of rank 0: step, seconds a step, exposed wait, traffic of
    swap, DRAM, and the arguments of update(). On a terminal it is written over, twice a second at
    most; elsewhere a new line comes every ten seconds. The daemon is asked once a line.

    opt    Of forebay.attach().
    total  Steps of the whole training: shows the remaining time.
    every  Seconds between two lines, or states of the line; 0: at each update().
    file   Default: sys.stderr.

    Errors  E_OPTION  every is not a number from 0 on, or total is none from 1 on.

    >>> import sys
    >>> opt = forebay.attach(model)
    >>> with forebay.Progress(opt, total=2, every=0, file=sys.stdout) as progress:
    ...     for _ in range(2):
    ...         loss = model(inputs).square().mean()
    ...         loss.backward()
    ...         opt.step()
    ...         progress.update(loss=loss.item())
    step 1/2 ... loss ...
    step 2/2 ... loss ...
    """

    def __init__(
        self,
        opt: ForebayOptimizer,
        total: int | None = None,
        *,
        every: float | None = None,
        file: TextIO | None = None,
    ) -> None:
        self._opt, self._total = opt, total
        self._file = sys.stderr if file is None else file
        self._rewrites = self._file.isatty()
        self._every = (REWRITE_S if self._rewrites else LINE_S) if every is None else every
        if not isinstance(self._every, (int, float)) or not self._every >= 0:
            raise usage_error(
                "E_OPTION", f"every is {every!r}, not a number of seconds", "every=10.0"
            )
        if total is not None and (not isinstance(total, int) or total < 1):
            raise usage_error(
                "E_OPTION", f"total is {total!r}, not a number of steps", "total=1000"
            )
        node = opt._engine.node
        self._is_open = node is None or node.rank == 0
        self._began = time.monotonic(), opt.committed_step
        self._shown_s, self._shown_step = float("-inf"), -1
        self._width = 0  # characters of the line on the terminal
        self._values: dict[str, float] = {}

    def update(self, **values: float) -> None:
        """Call it after each step(). Shows nothing where the last line is not old enough.

        values  Numbers of the script's own, shown behind the others.

        >>> opt = forebay.attach(model)
        >>> opt.step()
        >>> forebay.Progress(opt, every=3600).update(loss=0.5)
        """
        self._values = values
        if self._is_open and time.monotonic() - self._shown_s >= self._every:
            self._show()

    def close(self) -> None:
        """Shows the last step, where it is not shown yet, and ends the line on a terminal. `with` calls it
        at its end.

        >>> forebay.Progress(forebay.attach(model), file=open("/dev/null", "w")).close()
        """
        is_attached = self._opt._engine.attachment is not None
        if self._is_open and is_attached and self._opt.committed_step != self._shown_step:
            self._show()
        self._end_line()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        self._end_line()  # after an error the daemon is not asked: it may be dead

    def _end_line(self) -> None:
        if self._width:
            print(file=self._file, flush=True)
        self._is_open, self._width = False, 0

    def _show(self) -> None:
        line = self._line(self._opt.metrics())
        self._shown_s, self._shown_step = time.monotonic(), self._opt.committed_step
        if not self._rewrites:
            print(line, file=self._file, flush=True)
            return
        line = line[: shutil.get_terminal_size().columns - 1]
        print("\r" + line.ljust(self._width), end="", file=self._file, flush=True)
        self._width = len(line)

    def _line(self, values: dict[str, float]) -> str:
        step, step_s = int(values["forebay/step"]), values["forebay/step_s"]
        wait_s = values["forebay/exposed_wait_s"]
        parts = [f"step {step}" if self._total is None else f"step {step}/{self._total}"]
        if step_s > 0:
            parts.append(f"{step_s:.3g} s/step")
            parts.append(f"wait {wait_s:.3g} s ({wait_s / step_s:.0%})")
        if RATE_NAMES["read"] in values and values["forebay/swap_used_bytes"] > 0:
            read, written = (values[name] for name in RATE_NAMES.values())
            parts.append(f"swap {read / 1e9:.2f} GB/s read, {written / 1e9:.2f} written")
        if "forebay/dram_used_bytes" in values:
            used, limit = values["forebay/dram_used_bytes"], values["forebay/dram_limit_bytes"]
            parts.append(f"DRAM {size(int(used))} of {size(int(limit))}")
        if "forebay/grad_norm" in values:
            parts.append(f"norm {values['forebay/grad_norm']:.3g}")
        parts += [f"{name} {value:.4g}" for name, value in self._values.items()]
        done = step - self._began[1]
        if self._total is not None and done > 0:
            seconds = (time.monotonic() - self._began[0]) / done * max(self._total - step, 0)
            parts.append(f"left {_clock(seconds)}")
        return "  ".join(parts)


def _clock(seconds: float) -> str:
    """
    >>> _clock(3725.2)
    '1:02:05'
    """
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
