"""What heads share that lean on the target: its frozen ends, the draft vocabulary, the loss, the teacher-forced draft.

Shape suffixes: N tokens of a batch, R rows (anchors) of a step, H hidden size, D draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle3_train.config import DraftConfig
from eagle3_train.device import arg_max, block_rows
from eagle3_train.drafts.base import Draft, StepLoss, TargetPart
from eagle3_train.drafts.batch import DraftBatch, StepRows, find_segments, plan_rows
from eagle3_train.drafts.layer import Dims, rms_norm
from eagle3_train.drafts.vocab import DraftVocab

Step = tuple[int, StepRows, Tensor, Tensor]


class TargetHead(Draft):
    """What every head has of its target: the frozen ends, and what they give a batch."""

    # of the target, never trained
    embed_tokens: Tensor  # [V, H]
    target_norm: Tensor  # [H]
    target_rows: Tensor  # [D, H]: the target's lm_head at the draft vocabulary
    vocab_ids: Tensor  # [D] int64

    dims: Dims  # of the head's own layers; a subclass sets them

    def __init__(self, cfg: DraftConfig, target: TargetPart, vocab: DraftVocab, n_inputs: int) -> None:
        super().__init__()
        self.steps = cfg.steps
        self.vocab = vocab
        self.layer_config = target.config  # what the head's own layers are built like: sizes and rotary embedding
        self.n_layers, self.hidden_size = n_inputs + 1, int(target.config["hidden_size"])
        ids = torch.from_numpy(vocab.ids)
        frozen = {
            "embed_tokens": target.embed_tokens.float(),
            "target_norm": target.norm_weight.float(),
            "target_rows": target.lm_head[ids].float(),
            "vocab_ids": ids,
        }
        for name, tensor in frozen.items():
            self.register_buffer(name, tensor, persistent=False)
        self.frozen_parameters = self.embed_tokens.numel()

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        return self.vocab_ids.take(draft_ids)  # an index without dimensions would be read by the host

    def normed_final(self, final: Tensor) -> Tensor:
        """The target's final norm over its last pre-norm states, any shape [..., H]: what its own head reads."""
        return rms_norm(final, self.target_norm, self.dims.eps)

    @torch.no_grad()
    def target_probabilities(self, batch: DraftBatch) -> Tensor:
        """[M, D]: the target's distributions at step 0's anchors + 1, over the draft vocabulary, renormalised."""
        first = plan_rows(find_segments(batch.loss_mask, batch.starts), 1, batch.input_ids.device)[0]
        normed = self.normed_final(batch.hidden[first.anchors + 1, -1])
        logits = F.linear(normed, self.target_rows.to(normed.dtype))
        wide = torch.promote_types(logits.dtype, torch.float32)
        for part in logits.split(block_rows(logits.device)):
            part.copy_(part.to(wide).softmax(-1))
        return logits

    def randomise(self) -> None:
        """All linear maps at random, 1 / sqrt(inputs) wide."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)


class OnTarget(TargetHead):
    """A head whose steps each meet an output head of their own. A subclass gives `unroll`, `head_weight` and the
    drafting steps."""

    def __init__(self, cfg: DraftConfig, target: TargetPart, vocab: DraftVocab, n_inputs: int) -> None:
        super().__init__(cfg, target, vocab, n_inputs)
        self.trained_steps = cfg.steps
        self.dims = Dims.of_target(target.config)

    # -- what a subclass gives ----------------------------------------------------------------------------------------

    def unroll(self, batch: DraftBatch, steps: int) -> Iterator[Step]:
        """Steps 0..steps-1 for all anchors at once: (i, rows, hidden [R, H] that meets the head, target rows [R]).

        A row of step 0 is known by its index; the target's distribution for anchor t at step i is that of position
        t + 1 + i, so its row in `target_probabilities` is `index + i`.
        """
        raise NotImplementedError

    def head_weight(self, step: int) -> Tensor:
        """[D, H]: rows of the output head at a step."""
        raise NotImplementedError

    def step_loss(
        self,
        loss: StepLoss,
        i: int,
        hidden: Tensor,
        targets: Tensor,
        target_rows: Tensor,
        at: Tensor,
        batch: DraftBatch,
    ) -> Tensor:
        """Loss of the rows that count at step i; `at` [R]: the positions whose distributions supervise them."""
        return loss(i, hidden, self.head_weight(i), targets, target_rows)

    # -- training and replay ------------------------------------------------------------------------------------------

    def forward(self, batch: DraftBatch, loss: StepLoss) -> Tensor:
        """The training loss has `trained_steps`; in evaluation all K steps are shown to the objective."""
        targets = self.target_probabilities(batch)
        total = targets.new_zeros((), dtype=torch.promote_types(targets.dtype, torch.float32))
        kept = loss.select(self.kept_targets(batch.target_argmax))
        for i, rows, hidden, target_rows in self.unroll(batch, self.trained_steps if self.training else self.steps):
            at = rows.anchors + 1 + i
            if kept is not None:
                counted = rows.where(kept, 1 + i)
                hidden, target_rows, at = hidden[counted], target_rows[counted], at[counted]
            total = total + self.step_loss(loss, i, hidden, targets, target_rows, at, batch)
        return total

    @torch.no_grad()
    def predict(self, batch: DraftBatch) -> Tensor:
        drafted = torch.full((batch.n_tokens, self.steps), -1, dtype=torch.int64, device=batch.input_ids.device)
        for i, rows, hidden, _ in self.unroll(batch, self.steps):
            weight = self.head_weight(i)
            best = torch.cat([arg_max(F.linear(part, weight)) for part in hidden.split(1024)])
            drafted[rows.anchors, i] = self.target_ids(best)
        return drafted

    def next_embeddings(self, batch: DraftBatch) -> Tensor:
        """[N, H]: of x_{t+1} at each position t. A document's last one borrows its neighbour's: no anchor sees it."""
        return F.embedding(batch.input_ids.roll(-1), self.embed_tokens).to(batch.hidden.dtype)
