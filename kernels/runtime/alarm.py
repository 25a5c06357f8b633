"""The host's end of bounded waits: sets their limit, hears of the ones given up.

In: the report, the first words of what a kernel polls. Out: the Report of a launch whose waits
expired. Next on the walk: ../hopper/one_row/runner.py.
"""

from ctypes import c_int32

import torch
from torch import Tensor

from distmega.kernels.runtime.report import (
    NO_REPORT,
    REPORT_ALARM,
    REPORT_FIRST,
    REPORT_LIMIT,
    REPORT_WORDS,
    Report,
    read_report,
)

LOCAL_LIMIT_S = 2.0
"""Seconds that a wait for another SM may last."""


class Alarm:
    """Bound to one kernel's report; asking costs nothing while no wait has expired."""

    def __init__(self, report: Tensor, limit_s: float) -> None:
        """report: int64 [at least REPORT_WORDS] on the GPU. limit_s: seconds a wait may last."""
        self.limit_s, self._report = limit_s, report[:REPORT_WORDS]
        self._raised = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=report.is_cuda)
        self._report[REPORT_FIRST] = NO_REPORT
        self._report[REPORT_LIMIT] = round(limit_s * 1e9)
        self._report[REPORT_ALARM] = self._raised.data_ptr()
        # read as Python's: asking the tensor takes torch 2 us
        self._raised_word = c_int32.from_address(self._raised.data_ptr())

    def take(self) -> Report | None:
        """What waits of earlier launches came to nothing, once; waits for those launches if so."""
        if not self._raised_word.value:
            return None
        self._synchronize()
        report = read_report(int(self._report[REPORT_FIRST]))
        self._report[REPORT_FIRST] = NO_REPORT
        self._synchronize()
        self._raised_word.value = 0
        return report

    def _synchronize(self) -> None:
        if self._report.is_cuda:
            torch.cuda.synchronize(self._report.device)
