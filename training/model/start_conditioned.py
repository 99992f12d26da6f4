"""The head of ALBERT's run_squad_v2 for SQuAD 2.0, which is XLNet's (arXiv 1906.08237).

Shape legend: C windows of questions, S positions, R rows of one window, H hidden size, D = 2 * H,
T starts in the beam.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from albert_serve.bundle.weights import NUM_BEAMS
from albert_serve.config import AlbertConfig
from training.model.dropout import Dropout


class StartConditionedHead(nn.Module):
    """Start logits, end logits given a start, and the answerability of a window."""

    def __init__(self, config: AlbertConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.start = nn.Linear(size, 1)
        self.end_dense = nn.Linear(2 * size, size)
        self.end_norm = nn.LayerNorm(size, eps=config.layer_norm_eps)
        self.end_output = nn.Linear(size, 1)
        self.answer_dense = nn.Linear(2 * size, size)
        self.dropout = Dropout(config.classifier_dropout, site=4)
        self.answer_output = nn.Linear(size, 1, bias=False)

    def forward(self, rows_RH: Tensor, starts_T: Tensor | None = None) -> Tensor:
        """Logits (R, 2 + `NUM_BEAMS`) of the rows (R, H) of one window: [CLS], then its context.

        They are the start, the answerability (the same in all rows), and the end given each of the
        best starts; 0 where the window has fewer rows.

        Args:
            rows_RH: where an answer can be, and [CLS] first.
            starts_T: the rows of the starts, in place of the best ones.
        """
        start_R = self.start_logits(rows_RH)
        if starts_T is None:
            starts_T = start_R.sort(descending=True, stable=True).indices[:NUM_BEAMS]
        end_TR = self.end_logits(rows_RH.expand(len(starts_T), -1, -1), rows_RH[starts_T])
        missing = NUM_BEAMS - len(starts_T)
        end_RT = nn.functional.pad(end_TR.T, (0, missing))
        answer_R1 = self.answer_logits(rows_RH[None], start_R[None]).expand(len(rows_RH))[:, None]
        return torch.cat([start_R[:, None], answer_R1, end_RT], dim=-1)

    def start_logits(self, hidden: Tensor) -> Tensor:
        """Logits (...) of hidden states (..., H)."""
        logits: Tensor = self.start(hidden)
        return logits.squeeze(-1)

    def end_logits(self, hidden_CSH: Tensor, starts_CH: Tensor) -> Tensor:
        """Logits (C, S), given the hidden state of each window's start."""
        pairs_CSD = torch.cat([hidden_CSH, starts_CH[:, None].expand_as(hidden_CSH)], dim=-1)
        normed_CSH = self.end_norm(torch.tanh(self.end_dense(pairs_CSD)))
        logits_CS1: Tensor = self.end_output(normed_CSH)
        return logits_CS1.squeeze(-1)

    def answer_logits(
        self, hidden_CSH: Tensor, start_CS: Tensor, keys_C: Tensor | None = None
    ) -> Tensor:
        """Logits (C) of "no answer", from the [CLS] rows and the sums of rows by start logits.

        Args:
            keys_C: of dropout, of the [CLS].
        """
        shares_CS = start_CS.softmax(-1).to(hidden_CSH.dtype)
        summary_CH = torch.einsum("cs,csh->ch", shares_CS, hidden_CSH)
        pairs_CD = torch.cat([summary_CH, hidden_CSH[:, 0]], dim=-1)
        logits_C1: Tensor = self.answer_output(
            self.dropout(torch.tanh(self.answer_dense(pairs_CD)), keys_C)
        )
        return logits_C1.squeeze(-1)
