"""`eagle3 store info | verify | sample | finalize | merge | prune`: look after a store by hand."""

from __future__ import annotations

import argparse

import numpy as np

from eagle3_train.console import progress_bar, say, size

from .codec import DTYPES
from .folder import Folder
from .manifest import Manifest, finalize
from .reader import Store
from .rolling import KEPT, Rolling, is_rolling
from .schema import Sequence, StoreSpec
from .signs import READERS, WORKERS, read_signs
from .transform import merge, prune
from .verify import verify
from .writer import read_spec


def main(argv: list[str]) -> int:
    """Exit status: 0, or 1 where `verify` found something. A user's mistake is a ValueError."""
    parser = argparse.ArgumentParser("eagle3 store", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument("path", help="the store: a folder, or a URI such as s3://bucket/store")
        return sub

    command("info", "What a store holds, from its manifest and index.")
    command("verify", "Check every byte and every value; name what is damaged and what repairs it.")
    sample = command("sample", "Print some sequences.")
    sample.add_argument("--rows", type=int, nargs="+", default=[0], help="rows in the store's order (default: 0)")
    write = command("finalize", "Write index and manifest of a store whose shards are all there.")
    write.add_argument("--allow", nargs="+", default=[], metavar="FIELD", help="spec fields that may differ")
    joined = commands.add_parser("merge", help="Write one store of the sequences of several.")
    joined.add_argument("path", nargs="+", help="the stores: same target, layers and dtype")
    joined.add_argument("--seed", type=int, default=0, help="of the order of the rows: the corpus's (default: 0)")
    less = command("prune", "Write a smaller store: fewer rows, or a smaller dtype.")
    less.add_argument("--rows", type=int, help="keep the first ROWS")
    less.add_argument("--tokens", type=int, help="keep the shortest prefix of at least TOKENS")
    less.add_argument("--sources", nargs="+", help="keep only rows of these sources")
    less.add_argument("--dtype", choices=list(DTYPES), help="of the new store (default: as it is)")
    for sub in (joined, less):
        sub.add_argument("--out", required=True, help="the new store")
        sub.add_argument("--shards", type=int, help="of the new store (default: as many for as much)")
    args = parser.parse_args(argv)
    if args.command == "finalize":
        return _finalize(args.path, args.allow)
    if args.command == "merge":
        total = sum(Store.open(path).manifest.tokens for path in args.path)
        with progress_bar("merge", total, "tokens") as bar:
            return _written(args.out, merge(args.path, args.out, args.seed, args.shards, bar.update))
    if args.command == "prune":
        with progress_bar("prune", args.tokens or Store.open(args.path).manifest.tokens, "tokens") as bar:
            choice = (args.rows, args.tokens, args.sources, args.dtype, args.shards)
            return _written(args.out, prune(args.path, args.out, *choice, bar.update))
    if args.command == "info" and is_rolling(args.path):
        return _rolling_info(Folder(args.path))
    store = Store.open(args.path)
    if args.command == "info":
        return _info(store)
    if args.command == "verify":
        return _verify(store)
    return _sample(store, args.rows)


def _finalize(path: str, allow: list[str]) -> int:
    folder = Folder(path)
    if is_rolling(path):
        raise ValueError(f"{path} is a rolling store: eagle3 capture store.mode=whole makes a whole store of it")
    shards = sorted(name for name in folder.sizes() if name.startswith("shard-"))
    if not shards:
        raise ValueError(f"{path} holds no shards: run eagle3 capture")
    return _written(path, finalize(path, read_spec(folder, shards[0]), allow))


def _written(path: str, manifest: Manifest) -> int:
    say(f"{path}: {manifest.rows:,} rows, {manifest.tokens:,} tokens, fingerprint {manifest.fingerprint}")
    return 0


def _info(store: Store) -> int:
    manifest, spec = store.manifest, store.spec
    lengths = store.index.n_tokens
    sources = store.index.source.value_counts().to_pylist()
    there = store.folder.sizes()
    missing = sum(shard.name not in there for shard in manifest.shards)
    groups = len(np.unique(store.index.shard.astype(np.int64) << 32 | store.index.row_group))
    facts = {
        "fingerprint": manifest.fingerprint,
        **_captured_as(spec),
        "sequences": f"{manifest.rows:,} of {lengths.min():,} to {lengths.max():,} tokens, "
        f"median {np.median(lengths):,.0f}",
        "tokens": _tokens(manifest),
        "sources": ", ".join(f"{s['values']} {s['counts']:,}" for s in sources),
        "size": f"{size(manifest.bytes)} in {len(manifest.shards):,} shards, {groups:,} row groups; "
        f"{manifest.bytes / manifest.tokens:,.0f} bytes a token"
        + (f"; {missing} of the shards are missing: eagle3 store verify names them" if missing else ""),
        "sampling": ", ".join(f"{k}={v}" for k, v in spec.sampling.items()) or "none: the corpus's own text",
        "generator": spec.generator,
    }
    return _show(store.folder.uri, facts)


def _rolling_info(folder: Folder) -> int:
    """Of a store that rolls: what is known of it, what is there now, and what its two sides said last."""
    rolling = Rolling.read(folder)
    spec = rolling.spec
    there = [n for where in (folder, folder.child(KEPT)) for name, n in where.sizes().items() if "shard-" in name]
    workers = read_signs(folder, WORKERS)
    caps = {worker["cap_bytes"] for worker in workers.values() if "cap_bytes" in worker}
    facts = {
        "fingerprint": rolling.fingerprint,
        **_captured_as(spec),
        "sequences": f"{rolling.rows:,}",
        "tokens": _tokens(rolling),
        "size": f"rolls: {len(there)} of {spec.n_shards:,} shards are here now, {size(sum(there))}; all "
        f"together at most {size(sum(rolling.shard_bytes))}"
        + "".join(f"; its workers keep within {size(cap)} (store.cap_gib)" for cap in caps),
    }
    for signs, noun in ((workers, "capture worker"), (read_signs(folder, READERS), "run")):
        facts |= {f"{noun} {name}": f"{s['doing']} ({s['host']})" for name, s in signs.items()}
    return _show(folder.uri, facts)


def _captured_as(spec: StoreSpec) -> dict[str, str]:
    return {
        "target": f"{spec.target} (weights {_short(spec.target_hash)}, tokenizer {_short(spec.tokenizer_hash)}, "
        f"chat template {_short(spec.chat_template_hash)})",
        "hidden states": f"layer ids {', '.join(map(str, spec.layer_ids))} of {spec.n_layers} layers, "
        f"H {spec.hidden_size}, {spec.dtype} (computed in {spec.compute_dtype})",
    }


def _short(digest: str) -> str:
    """Enough of a hash to tell by eye; the manifest has it whole."""
    return digest[:16]


def _tokens(counts: Manifest | Rolling) -> str:
    share = 100 * counts.supervised_tokens / counts.tokens
    return f"{counts.tokens:,}, of them supervised {counts.supervised_tokens:,} ({share:.1f} %)"


def _show(title: str, facts: dict[str, str]) -> int:
    width = max(map(len, facts))
    say("\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in facts.items())]))
    return 0


def _verify(store: Store) -> int:
    found = 0
    with progress_bar("verify", store.manifest.bytes / 2**20, "MiB") as bar:
        for problem in verify(store, lambda n_bytes: bar.update(n_bytes / 2**20)):
            found += 1
            say(str(problem))
    rows = f"{len(store.manifest.shards):,} shards, {len(store):,} rows"
    problems = f"{found} problem{'s' * (found > 1)} in" if found else "sound,"
    say(f"{store.folder.uri}: {problems} {rows}")
    return min(found, 1)


def _sample(store: Store, rows: list[int]) -> int:
    if outside := [row for row in rows if not 0 <= row < len(store)]:
        raise ValueError(f"--rows {outside[0]}: {store.folder.uri} has rows 0 to {len(store) - 1}")
    for row, sequence in zip(rows, store.read(rows), strict=True):
        say(_describe(row, sequence, store.spec.layer_ids))
    return 0


def _describe(row: int, sequence: Sequence, layer_ids: tuple[int, ...]) -> str:
    norms = sequence.hidden.float().norm(dim=-1)  # [T, layers]
    edges = np.flatnonzero(np.diff(sequence.loss_mask, prepend=0, append=0))
    spans = ", ".join(f"{a}..{b - 1}" for a, b in edges.reshape(-1, 2))
    layers = ", ".join(
        f"{layer} {mean:.3g} (max {high:.3g})"
        for layer, mean, high in zip(layer_ids, norms.mean(0).tolist(), norms.amax(0).tolist(), strict=True)
    )
    first = " ".join(map(str, sequence.input_ids[:24].tolist()))
    known = sequence.target_argmax[:-1] >= 0
    agree = sequence.target_argmax[:-1] == sequence.input_ids[1:]
    lines = [
        f"row {row}: {sequence.sample_id} from {sequence.source}, {sequence.n_tokens} tokens, "
        f"{sequence.n_supervised} supervised",
        f"  tokens      {first}{' ...' if sequence.n_tokens > 24 else ''}",
        f"  supervised  {spans or 'none'}",
        f"  norms by layer id  {layers}",
        f"  target's argmax is the next token at {100 * agree[known].mean():.1f} % of {known.sum()} positions"
        if known.any()
        else "  target's argmax was not computed",
    ]
    return "\n".join(lines)
