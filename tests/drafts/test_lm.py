"""The draft model against transformers' Llama, which shares no code with it, and against its own unrolled form."""

from __future__ import annotations

import torch
import transformers

from eagle3_train.config import LMConfig
from eagle3_train.drafts import DraftLM, supervised_counts
from eagle3_train.train.losses import Objective
from tests.drafts.tiny import THETA, H, V, tiny_batch, tiny_draft

CPU = torch.device("cpu")


def twin(head: DraftLM) -> transformers.LlamaForCausalLM:
    """A Llama with the head's weights."""
    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=H, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=6, rms_norm_eps=1e-5, tie_word_embeddings=False,
        rope_parameters={"rope_theta": THETA, "rope_type": "default"}, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).double()
    own = {f"model.{n}": p for n, p in head.named_parameters() if not n.startswith("lm_head")}
    missing, unexpected = model.load_state_dict(own | {"model.embed_tokens.weight": head.embed_tokens}, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    return model


def test_loss_and_every_gradient_equal_a_llama_with_these_weights() -> None:
    head, batch = tiny_draft("lm", 3, lm=LMConfig(2)), tiny_batch()
    assert isinstance(head, DraftLM)
    model = twin(head)
    expected, counts = torch.zeros((), dtype=torch.float64), supervised_counts(batch.loss_mask, batch.starts, 3)
    targets = head.target_probabilities(batch)
    weight = head.lm_head.weight.detach().clone().requires_grad_()
    row = 0
    for start, stop in zip(batch.starts[:-1], batch.starts[1:], strict=True):
        hidden = model.model(input_ids=batch.input_ids[start + 1 : stop][None]).last_hidden_state[0]
        for t in range(stop - start - 2):  # the output at t has read x_1 .. x_{t+1}
            if batch.loss_mask[start + t + 1] and batch.loss_mask[start + t + 2]:
                expected = expected - (targets[row] * (weight @ hidden[t]).log_softmax(0)).sum() / counts[0]
                row += 1
    assert row == counts[0]
    loss = head(batch, Objective(counts, 0.8, "keep", CPU))
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)  # its norms and angles are fp32
    loss.backward()
    expected.backward()
    theirs = dict(model.named_parameters())
    for name, parameter in head.named_parameters():
        other = weight.grad if name == "lm_head.weight" else theirs[f"model.{name}"].grad
        torch.testing.assert_close(parameter.grad, other, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
        assert other.abs().max() > 0, name
