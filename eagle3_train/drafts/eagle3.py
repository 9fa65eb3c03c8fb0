"""EAGLE-3: one decoder layer over fused target states, trained by unrolling its own drafting (training-time test).

Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test". The exact
computation is DESIGN section 5 / docs/mathematics.md. Module names are those of the speculators format.
Shape suffixes: N tokens of a batch, R rows (anchors) of a step, H hidden size of the target, W width of the head (H by
default), D draft vocabulary, d head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from eagle3_train.config import DraftConfig
from eagle3_train.device import arg_max
from eagle3_train.drafts.base import DraftState, StepLoss, TargetPart
from eagle3_train.drafts.batch import DraftBatch, StepRows, find_segments, plan_rows
from eagle3_train.drafts.decoder import Unrolled
from eagle3_train.drafts.layer import Dims, Layer, RMSNorm, Rotary, rope_inverse_frequencies
from eagle3_train.drafts.on_target import TargetHead
from eagle3_train.drafts.vocab import DraftVocab


class Eagle3(TargetHead):
    """The EAGLE-3 draft head."""

    def __init__(self, cfg: DraftConfig, target: TargetPart, vocab: DraftVocab, n_inputs: int) -> None:
        super().__init__(cfg, target, vocab, n_inputs)
        self.attention = cfg.attention
        self.recompute, self.compiled = cfg.recompute, cfg.compile
        whole = Dims.of_target(target.config)
        options = cfg.eagle3
        self.dims = dims = whole.resized(options.hidden_size, options.intermediate_size)
        resized = dims.hidden != whole.hidden
        embedded = target.embed_tokens.shape[1]  # a published head of another width brings its own embedding
        self.embed_proj = nn.Linear(embedded, dims.hidden, bias=False) if embedded != dims.hidden else None
        self.input_norm = RMSNorm(n_inputs * whole.hidden, dims.eps) if options.norm_before_fc else None
        norms = (RMSNorm(whole.hidden, dims.eps) for _ in range(n_inputs))
        self.fc_norm = nn.ModuleList(norms) if options.fc_norm else None
        self.fc = nn.Linear(n_inputs * whole.hidden, dims.hidden, bias=False)
        self.layers = nn.ModuleList(
            [Layer(dims, number == 0, options.norm_before_residual) for number in range(options.layers)]
        )
        self.norm = RMSNorm(dims.hidden, dims.eps)
        self.norm_output = options.norm_output
        # A head of another width that starts from the target's rows reads them through a projection of its own.
        through = resized and cfg.init_lm_head == "target"
        self.head_proj = nn.Linear(dims.hidden, whole.hidden, bias=False) if through else None
        self.lm_head = nn.Linear(whole.hidden if through else dims.hidden, len(vocab.ids), bias=False)
        self.rotary = Rotary(rope_inverse_frequencies(target.config, dims.head_dim))
        self._initialise(cfg, target)
        self.lm_head.weight.requires_grad_(options.lm_head == "trained")

    def _initialise(self, cfg: DraftConfig, target: TargetPart) -> None:
        self.randomise()
        with torch.no_grad():
            if cfg.init_lm_head == "target":
                self.lm_head.weight.copy_(self.target_rows)
                if self.head_proj is None:
                    self.norm.weight.copy_(self.target_norm)
            if cfg.init_layer == "target":
                if self.dims != Dims.of_target(target.config):
                    raise ValueError(
                        "draft.init_layer=target copies the target's last layer, which has other sizes than "
                        "draft.eagle3.hidden_size and intermediate_size ask for: use draft.init_layer=random"
                    )
                self._start_from_target_layer(target.last_layer)

    def _start_from_target_layer(self, weights: dict[str, Tensor]) -> None:
        """The target's last layer, reading the hidden half of its input; `fc` passes the top state through. Deeper
        layers pass on what they get."""
        hidden, layer = self.dims.hidden, self.layer
        self.fc.weight.zero_()
        self.fc.weight[:, -hidden:].copy_(torch.eye(hidden))
        for name, parameter in layer.named_parameters():
            if name == "input_layernorm.weight":
                continue  # of the embedding, which the target's layer does not see
            source = weights["input_layernorm.weight" if name == "hidden_norm.weight" else name]
            if name.split(".")[-2] in ("q_proj", "k_proj", "v_proj"):
                parameter.zero_()
                parameter[:, hidden:].copy_(source)
            else:
                parameter.copy_(source)
        for deeper in list(self.layers)[1:]:
            assert isinstance(deeper, Layer)
            deeper.self_attn.o_proj.weight.zero_()
            deeper.mlp.down_proj.weight.zero_()

    @property
    def layer(self) -> Layer:
        """The first layer."""
        layer = self.layers[0]
        assert isinstance(layer, Layer)
        return layer

    # -- what training and decoding share -----------------------------------------------------------------------------

    def _fuse(self, features: Tensor) -> Tensor:
        """The target's input states [R, n_inputs, H] -> [R, W]."""
        if self.fc_norm is not None:
            features = torch.stack([norm(x) for norm, x in zip(self.fc_norm, features.unbind(1), strict=True)], 1)
        joined = features.flatten(1)
        return self.fc(joined if self.input_norm is None else self.input_norm(joined))

    def _embed(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Normed embeddings [R, W] of token ids [R]."""
        embedded = F.embedding(ids, self.embed_tokens).to(dtype)
        return self.layer.input_layernorm(embedded if self.embed_proj is None else self.embed_proj(embedded))

    def _output(self, hidden: Tensor) -> Tensor:
        """What the next step takes in, of the last layer's output [R, W]."""
        return self.norm(hidden) if self.norm_output else hidden

    def _readout(self, output: Tensor) -> Tensor:
        """What `lm_head` takes in, of a step's `_output` [R, W]."""
        normed = output if self.norm_output else self.norm(output)
        return normed if self.head_proj is None else self.head_proj(normed)

    # -- training-time test -------------------------------------------------------------------------------------------

    def _unroll(self, batch: DraftBatch) -> Iterator[tuple[int, StepRows, Tensor, Tensor]]:
        """Steps 0..K-1 for all anchors at once: (i, rows, output [R, W], target rows [R]).

        A row of step 0 is known by its index; the target distribution of anchor t at step i is that of position
        t + 1 + i, which is row `index + i` of step 0's anchors shifted by one: the targets are computed once. The same
        holds for the embedding's half of the first layer's projections: anchor t at step i reads the token that
        position t + i reads at step 0, so it is multiplied once a token.
        """
        device = batch.input_ids.device
        plan = plan_rows(find_segments(batch.loss_mask, batch.starts), self.steps, device)
        all_tokens = batch.every_token
        # Position t carries the embedding of x_{t+1}. A document's last one borrows its neighbour's: no anchor sees it.
        embedded = self._embed(batch.input_ids.roll(-1), batch.hidden.dtype)
        hidden = self._fuse(batch.hidden[:, :-1])
        width = self.dims.hidden
        first = self.layer.self_attn
        q_embed, q_hidden = first.q_proj.weight.split(width, 1)
        kv_embed, kv_hidden = torch.cat((first.k_proj.weight, first.v_proj.weight)).split(width, 1)
        embedded_kv = F.linear(embedded, kv_embed)
        q_rows = plan[0] if len(self.layers) == 1 else all_tokens  # whose queries step 0 computes in the first layer
        embedded_q = F.linear(embedded.index_select(0, q_rows.anchors), q_embed)
        q_index = plan[0].anchors if len(self.layers) > 1 else torch.arange(len(plan[0]), device=device)

        index = torch.arange(len(plan[0]), device=device)
        memories: list[Unrolled] = []  # of each layer
        for i, rows in enumerate(plan):
            now = rows if i else all_tokens
            if rows.keep is not None:
                index, q_index = index[rows.keep], q_index[rows.keep]
                hidden = hidden.index_select(0, rows.keep)
            for number, layer in enumerate(self.layers):
                assert isinstance(layer, Layer)
                normed = layer.norm(hidden)
                if number == 0:
                    known = embedded_kv.index_select(0, now.anchors + i) if i else embedded_kv
                    k, v = first.split(torch.addmm(known, normed, kv_hidden.T)).chunk(2, -2)
                else:
                    k, v = layer.self_attn.key_value(normed)
                if i:
                    memories[number].extend(i, rows, k, v)
                else:
                    memories.append(Unrolled(self.rotary, self.attention, batch, k, v))
                    if number == len(self.layers) - 1:  # from here on only anchors matter
                        now = rows
                        hidden, normed = hidden.index_select(0, rows.anchors), normed.index_select(0, rows.anchors)
                if number == 0:
                    known = embedded_q.index_select(0, q_index + i) if i else embedded_q
                    q = first.split(torch.addmm(known, normed, q_hidden.T))
                else:
                    q = layer.self_attn.query(normed)
                hidden = self._finish(layer, hidden, normed, memories[number].attend(i, now, q))
            hidden = self._output(hidden)
            yield i, rows, hidden, index + i

    def _finish(self, layer: Layer, hidden: Tensor, normed: Tensor, attended: Tensor) -> Tensor:
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(layer.finish, hidden, normed, attended, use_reentrant=False, preserve_rng_state=False)
        return layer.finish(hidden, normed, attended)

    def forward(self, batch: DraftBatch, loss: StepLoss) -> Tensor:
        targets = self.target_probabilities(batch)
        kept = loss.select(self.kept_targets(batch.target_argmax))
        outputs: list[Tensor] = []
        supervised: list[Tensor] = []
        for i, rows, output, target_rows in self._unroll(batch):
            if kept is not None:
                counted = rows.where(kept, 1 + i)
                output, target_rows = output.index_select(0, counted), target_rows[counted]
            outputs.append(output)
            supervised.append(target_rows)
        rows_by_step = [len(rows) for rows in supervised]
        # One call for all steps: one gradient of lm_head in memory, not K.
        return loss.steps(
            rows_by_step, self._readout(torch.cat(outputs)), self.lm_head.weight, targets, torch.cat(supervised)
        )

    @torch.no_grad()
    def predict(self, batch: DraftBatch) -> Tensor:
        drafted = torch.full((batch.n_tokens, self.steps), -1, dtype=torch.int64, device=batch.input_ids.device)
        for i, rows, output, _ in self._unroll(batch):
            best = torch.cat([arg_max(self.lm_head(part)) for part in self._readout(output).split(1024)])
            drafted[rows.anchors, i] = self.target_ids(best)
        return drafted

    # -- decoding -----------------------------------------------------------------------------------------------------

    def new_state(self) -> DraftState:
        shape = (256, len(self.layers), self.dims.n_kv, self.dims.head_dim)
        return DraftState(self.fc.weight.new_empty(shape), self.fc.weight.new_empty(shape))

    @torch.no_grad()
    def observe(self, state: DraftState, next_ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """next_ids [n]: x_{t+1} of the n new positions; features [n, n_inputs, H]: the target's states there."""
        n = len(next_ids)
        state.chain = 0
        first, state.length = state.length, state.length + n
        fused = self._fuse(features.to(self.fc.weight.dtype))
        positions = torch.arange(first, state.length, device=fused.device)
        causal = None
        if len(self.layers) > 1:  # the lower layers' outputs are needed of every position
            causal = torch.ones(n, state.length, dtype=torch.bool, device=fused.device).tril(first)
        output, logits = self._run(state, next_ids, fused, first, positions, causal, last_only=True)
        return output[0], logits[0]

    @torch.no_grad()
    def step(self, state: DraftState, token: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h, logits = self._advance(state, token.view(1), h[None], state.chain + 1, None)
        return h[0], logits[0]

    @torch.no_grad()
    def expand(
        self, state: DraftState, tokens: Tensor, h: Tensor, depth: int, visible: Tensor
    ) -> tuple[Tensor, Tensor]:
        observed = visible.new_ones(len(visible), state.length)
        return self._advance(state, tokens, h, depth, torch.cat((observed, visible), 1))

    def _advance(
        self, state: DraftState, tokens: Tensor, h: Tensor, depth: int, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Steps of m drafted tokens, all `depth` positions after the last observed one."""
        positions = torch.full((len(tokens),), state.length - 1 + depth, device=h.device)
        slot = state.length + state.chain
        state.chain += len(tokens)
        return self._run(state, tokens, h, slot, positions, mask, last_only=False)

    def _run(
        self,
        state: DraftState,
        tokens: Tensor,
        hidden: Tensor,
        slot: int,
        positions: Tensor,
        mask: Tensor | None,
        last_only: bool,
    ) -> tuple[Tensor, Tensor]:
        """Rows into the slots from `slot` on, through all layers: (output [m, W], logits [m, D]).

        hidden [m, W]; mask [m, slot + m] bool, without one all slots are attended to. With `last_only` the last layer
        computes the last row alone, which sees every slot.
        """
        end = slot + len(tokens)
        state.reserve(end)
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            normed = layer.norm(hidden)
            x = torch.cat((self._embed(tokens, hidden.dtype), normed), -1) if number == 0 else normed
            k, v = layer.self_attn.key_value(x)
            state.keys[slot:end, number] = self.rotary.rotate(k, positions, end)
            state.values[slot:end, number] = v
            if last_only and number == len(self.layers) - 1:
                x, normed, hidden, positions, mask = x[-1:], normed[-1:], hidden[-1:], positions[-1:], None
            q = self.rotary.rotate(layer.self_attn.query(x), positions, end)
            keys, values = (t[:end, number].transpose(0, 1)[None] for t in (state.keys, state.values))
            attended = F.scaled_dot_product_attention(
                q.transpose(0, 1)[None], keys, values, attn_mask=mask, enable_gqa=True
            )
            hidden = layer.finish(hidden, normed, attended[0].transpose(0, 1))
        output = self._output(hidden)
        return output, self.lm_head(self._readout(output))

    # -- cost ---------------------------------------------------------------------------------------------------------

    def flops(self, batch: DraftBatch) -> float:
        """Multiply-adds counted twice; backward as twice the forward, or as much where no gradient goes further down;
        frozen matrices without the half that would be their own gradient."""
        segments = find_segments(batch.loss_mask, batch.starts)
        d, n, depth = self.dims, batch.n_tokens, len(self.layers)
        rows = [sum(s.rows(i) for s in segments) for i in range(self.steps)]
        layer = self.layer
        kv = (layer.self_attn.k_proj.weight.numel() + layer.self_attn.v_proj.weight.numel()) // 2  # a half
        q = layer.self_attn.q_proj.weight.numel() // 2
        rest = sum(p.numel() for p in layer.parameters() if p.dim() == 2) - 2 * (kv + q)  # o and MLP
        bottom = n * (self.fc.weight.numel() + (self.embed_proj.weight.numel() if self.embed_proj else 0))
        passed_down = self.fc_norm is not None or self.input_norm is not None
        trained = float(n * kv + (rows[0] if depth == 1 else n) * q)  # the embedding's halves
        pairs = 0.0
        for i, r in enumerate(rows):
            lower = r if i else n  # rows of the layers below the last
            trained += depth * (r if i else n) * kv + (depth - 1) * lower * (q + rest) + r * (q + rest)
            trained += r * (self.head_proj.weight.numel() if self.head_proj else 0)
            anchors = sum(s.rows(i) * (s.first - s.start + (s.rows(i) + 1) / 2 + i) for s in segments)
            whole = sum((b - a) * (b - a + 1) / 2 for a, b in pairwise(batch.starts))
            pairs += anchors + (depth - 1) * (anchors if i else whole)
        trained += pairs * 2 * d.n_heads * d.head_dim
        head = sum(rows) * self.lm_head.weight.numel() * (6 if self.lm_head.weight.requires_grad else 4)
        return 6.0 * trained + (6.0 if passed_down else 4.0) * bottom + head + 2.0 * rows[0] * self.target_rows.numel()
