"""From a configuration to the things that the loop works on: store, draft vocabulary, draft head."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import torch

from eagle3_train import drafts
from eagle3_train.config import Config, digest
from eagle3_train.drafts import Draft, DraftVocab, Eagle1, Eagle3, Medusa
from eagle3_train.export import HeadSource, format_of, read_published, start_from
from eagle3_train.files import read_object
from eagle3_train.store import (
    RollingStore,
    Store,
    expect_origin,
    is_rolling,
    read_target_part,
    token_counts,
)
from eagle3_train.target import prepare_target, weight_hash
from eagle3_train.train import checkpoint
from eagle3_train.trained import CHECKPOINTS, RECORD


def open_store(cfg: Config) -> Store:
    """The training store, checked against the configuration before any work. Whether its shards are there is for those
    to ask who read them: a trained head needs none."""
    store: Store
    if cfg.rolls and is_rolling(cfg.paths.store):
        store = RollingStore.open(cfg.paths.store, cfg.store.silent_minutes, cfg.reads_copies)
    else:
        store = Store.open(cfg.paths.store)
    store.expect(target=cfg.target.name, dtype=cfg.store.dtype)
    if cfg.capture.layer_ids is not None:
        store.expect(layer_ids=[*cfg.capture.layer_ids, store.spec.n_layers])
    expect_origin(cfg.paths.store, cfg.data_identity)
    _require_data(cfg, store)
    return store


def _require_data(cfg: Config, store: Store) -> None:
    """ValueError where the store holds less than a point trains on."""
    held, wanted = int(store.index.n_tokens.sum(dtype=np.int64)), cfg.data.sequences
    if wanted is None:
        assert cfg.data.tokens is not None
        wanted = -(-len(store) * cfg.data.tokens // held)  # by the mean length; above all rows where tokens are too few
    if wanted > len(store):
        raise ValueError(
            f"data.scale={cfg.data.scale:g} needs {cfg.data}, the store {cfg.paths.store} holds {len(store)} "
            f"({held:,} tokens): capture {wanted - len(store)} more "
            f"(corpus.sequences={wanted}, then eagle3 prepare and eagle3 capture), or lower data.scale"
        )


def build_head(cfg: Config, store: Store, device: torch.device, counts: np.ndarray) -> Draft:
    """A newly initialised head in fp32, or the published one that `draft.init_from` names; the same on every rank, by
    `cfg.seed`. `counts`: `token_counts` of the store."""
    part = read_target_part(cfg.paths.store, store.spec)
    torch.manual_seed(cfg.seed)
    if cfg.draft.init_from is not None:
        published = read_published(cfg.draft.init_from)
        head = start_from(published, cfg.draft, part, counts, store.spec.layer_ids[:-1])
    else:
        if cfg.draft.kind == "hf":
            expect_tokenizer(cfg)
        vocab = DraftVocab.from_counts(counts, cfg.draft.vocab_size)
        head = drafts.build(cfg.draft, part, vocab, n_inputs=len(store.spec.layer_ids) - 1)
    _expect_trees(cfg, head)
    return head.to(device)


def _expect_trees(cfg: Config, head: Draft) -> None:
    """ValueError where a static tree to evaluate with takes tokens that the draft vocabulary has not."""
    highest = max((rank for tree in cfg.eval.trees for node in tree.choices for rank in node), default=-1)
    if highest >= len(head.vocab.ids):
        raise ValueError(
            f"eval.trees: a static tree takes the token of rank {highest}, the draft vocabulary has "
            f"{len(head.vocab.ids)} (ranks from 0): lower the rank, or raise draft.vocab_size"
        )


def expect_tokenizer(cfg: Config) -> None:
    """ValueError unless the draft model of draft=hf maps text to the target's token ids."""
    from transformers import AutoTokenizer

    folder = prepare_target(cfg.target, cfg.paths.target)
    ours, theirs = (AutoTokenizer.from_pretrained(str(name)).get_vocab() for name in (folder, cfg.draft.hf.model))
    different = [token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token)]
    if different:
        raise ValueError(
            f"draft.hf.model={cfg.draft.hf.model} has another tokenizer than {cfg.target.name}: {len(different):,} "
            f"tokens are not the same, {sorted(different)[0]!r} among them. Its drafts would be other words: take a "
            "model of the target's family"
        )


def trains(cfg: Config, head: Draft) -> bool:
    """Whether a point's head is trained at all, and so has checkpoints."""
    return head.is_trained and cfg.train.regime != "none"


def parameter_counts(cfg: Config) -> dict[str, int]:
    """Parameters of the head that `cfg` describes, by part (see Draft.parameter_counts)."""
    store = open_store(cfg)
    return build_head(cfg, store, torch.device("cpu"), token_counts(store)).parameter_counts()


def seed_rank(seed: int, rank: int, step: int) -> None:
    """Random numbers (noise on features) that differ between ranks, and do not begin anew where a run continues."""
    torch.manual_seed(int(digest([seed, rank, step], 12), 16))


def copy_sharing_buffers(head: Draft) -> Draft:
    """Another head with parameters of its own; the target's tensors, which nothing changes, are the same ones."""
    return copy.deepcopy(head, {id(buffer): buffer for buffer in head.buffers()}).eval()


def load_head(cfg: Config, device: torch.device, store: Store | None = None) -> Draft:
    """The head of a point, trained to its end: from its last checkpoint. `store`: of `open_store`, where the caller has
    it. ValueError where training has not ended, or its last checkpoint is gone or damaged."""
    trained = cfg.point_dir / RECORD
    if not trained.is_file():
        raise ValueError(f"{cfg.point_dir} holds no trained head: run `eagle3 train` with the same overrides first")
    store = store or open_store(cfg)
    head = build_head(cfg, store, device, token_counts(store))
    if trains(cfg, head):
        found, steps = checkpoint.newest(cfg.point_dir / CHECKPOINTS), read_object(trained).get("steps")
        if found is None or found.step != steps:
            raise ValueError(
                f"{cfg.point_dir} was trained for {steps} steps, and "
                + (f"its newest checkpoint is of step {found.step}" if found else "holds no checkpoint")
                + ": run `eagle3 train` with the same overrides, which trains what is missing"
            )
        head.load_state_dict(found.weights({name: t.shape for name, t in head.state_dict().items()}))
    return head.eval()


def head_source(cfg: Config) -> HeadSource:
    """The trained head of a point with what an exported one says of itself."""
    store = open_store(cfg)
    head = load_head(cfg, torch.device("cpu"), store)
    format_of(head, cfg.export.format)  # refuses heads that have none
    assert isinstance(head, Eagle3 | Eagle1 | Medusa)
    # An engine finds the target by its hub id, or by its folder: a converted file's is ours.
    local = Path(cfg.target.model).expanduser()
    is_converted = cfg.target.model.endswith(".gguf")
    name = cfg.paths.target if is_converted else str(local.absolute()) if local.is_dir() else None
    if name is not None and Path(name).is_dir():  # the card names it
        store.expect(target_hash=weight_hash(name))
    return HeadSource(
        head=head,
        target=read_target_part(cfg.paths.store, store.spec).config,
        target_name=name or cfg.target.model,
        layer_ids=tuple(store.spec.layer_ids[:-1]),
        converted_from=cfg.target.model if is_converted else None,
    )
