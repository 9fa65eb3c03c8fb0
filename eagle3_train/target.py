"""The target model on disk and in memory: one plain Hugging Face folder, its tokenizer, and what identifies them."""

from __future__ import annotations

import hashlib
import inspect
import json
import mmap
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from logging import ERROR, getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3_train.config import TargetConfig
from eagle3_train.console import say
from eagle3_train.files import (
    file_digest,
    file_fingerprint,
    find_package_file,
    read_json,
    read_object,
    sweep_temporaries,
    temporary_path,
    write_json,
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

REFETCH = "fetch the target model again; if eagle3 converted it from a GGUF file, delete that folder"
SOURCE_FILE = "source.json"  # in a converted folder: what it was converted from
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json")
TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", TEMPLATE_FILE, "generation_config.json")


def prepare_target(cfg: TargetConfig, folder: str | Path) -> Path:
    """Path of the target as a plain Hugging Face folder.

    A folder or a hub id is used as it is (a hub model is downloaded to the hub's own cache). A GGUF file, by path or as
    `package:NAME/FILE.gguf`, is converted once to `folder`; `folder` appears whole or not at all.

    Raises:
        ValueError: no such folder, file or hub model (or no network), with the way out.
    """
    model = cfg.model
    if model.endswith(".gguf"):
        source = find_package_file(model) if model.startswith("package:") else Path(model).expanduser()
        if not source.is_file():
            raise ValueError(f"target.model={model}: no such file")
        return _converted(source, model, Path(folder))
    local = Path(model).expanduser()
    if local.is_dir():
        if not (local / "config.json").is_file():
            raise ValueError(f"target.model={model}: the folder holds no config.json, so it is no Hugging Face model")
        return local
    return _downloaded(cfg)


def _downloaded(cfg: TargetConfig) -> Path:
    from huggingface_hub import snapshot_download

    small = ["*.json", "*.model", "*.txt", "*.jinja"] + (["*.py"] if cfg.trust_remote_code else [])
    try:
        path = Path(snapshot_download(cfg.model, revision=cfg.revision, allow_patterns=[*small, "*.safetensors"]))
        if not any(path.glob("*.safetensors")):
            path = Path(snapshot_download(cfg.model, revision=cfg.revision, allow_patterns=[*small, "*.bin"]))
    except (OSError, ValueError) as e:
        raise ValueError(
            f"target.model={cfg.model} is neither a local folder, nor a .gguf file, nor a hub model that could be "
            f"fetched ({type(e).__name__}). Without network, download it elsewhere and give its folder as target.model"
        ) from e
    return path


def _converted(source: Path, spec: str, folder: Path) -> Path:
    identity = {"model": spec, "file": file_fingerprint(source)}
    if (folder / SOURCE_FILE).is_file():
        if read_json(folder / SOURCE_FILE) == identity:
            return folder
        say(f"{folder} was converted from another file than {spec}: converting anew")
    say(f"converting {source.name} to a plain Hugging Face folder, once; half a minute for a small model")
    sweep_temporaries(folder)
    aside = temporary_path(folder)
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        _convert_gguf(source, aside)
        write_json(aside / SOURCE_FILE, identity)
        _sync(aside)
        _replace(aside, folder, identity)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def _convert_gguf(source: Path, folder: Path) -> None:
    """Dequantise into `folder`. The values stay fp32, as dequantised: nearly none of them is a bf16 or fp16 number."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with _quiet(), _gguf_parsed_once():
        model = AutoModelForCausalLM.from_pretrained(str(source.parent), gguf_file=source.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
        # The loaded model calls itself quantised although its tensors are plain: a clean one of its class does not.
        not_ours = ("quantization_config", "_name_or_path", "_model_name_or_path")
        config = {k: v for k, v in model.config.to_dict().items() if k not in not_ours}
        with torch.device("meta"):
            plain = type(model)(type(model.config).from_dict(config))
        plain.load_state_dict(model.state_dict(), assign=True)
        plain.tie_weights()
        plain.generation_config = model.generation_config
        plain.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


@contextmanager
def _gguf_parsed_once() -> Iterator[None]:
    """transformers parses the file three times, and builds the map of tensor names once a submodule: with both kept, a
    conversion takes a third of the time. Neither is changed by its users."""
    import gguf

    slow = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    try:
        for name, function in slow.items():
            setattr(gguf, name, cache(function))
        yield
    finally:
        for name, function in slow.items():
            setattr(gguf, name, function)


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars of transformers' own, and no news of layers that are on disk, where they were put: ours say what
    is going on."""
    from transformers.utils import logging

    shown, placing = logging.is_progress_bar_enabled(), getLogger("accelerate.big_modeling")
    level = placing.level
    logging.disable_progress_bar()
    placing.setLevel(ERROR)
    try:
        yield
    finally:
        placing.setLevel(level)
        if shown:
            logging.enable_progress_bar()


def _sync(folder: Path) -> None:
    for file in folder.iterdir():
        with open(file, "rb") as f:
            os.fsync(f.fileno())


def _replace(aside: Path, folder: Path, identity: dict[str, str]) -> None:
    """Rename `aside` to `folder`. Another process may have been first: then its folder, of the same content, stays."""
    if folder.exists():
        old = aside.with_suffix(".old")
        folder.rename(old)
        shutil.rmtree(old)
    try:
        aside.rename(folder)
    except OSError:
        if not (folder / SOURCE_FILE).is_file() or read_json(folder / SOURCE_FILE) != identity:
            raise


def load_target(
    folder: str | Path,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool = False,
    device_map: str | dict[str, str] | None = None,
    max_memory: dict[int | str, str] | None = None,
    offload_folder: str | Path | None = None,
) -> PreTrainedModel:
    """The target as a causal language model of transformers, for inference alone: eval mode, no gradients, SDPA.

    Without a `device_map` all of it lies on `device`. With one, accelerate places its layers, a strategy's name such as
    `auto` or module by module, within `max_memory` of each device; what is left stays on disk, in the model's own files
    or, for weights in other files than safetensors, in `offload_folder`.
    """
    from transformers import AutoModelForCausalLM

    from eagle3_train.device import thin_products

    placed: dict[str, Any] = {}
    if device_map is not None:
        placed = {"device_map": device_map, "max_memory": max_memory, "offload_folder": offload_folder}
    with _quiet():
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=dtype, attn_implementation="sdpa", trust_remote_code=trust_remote_code, **placed
        )
    if device_map is None:
        model.to(device)  # type: ignore[arg-type]
        thin_products(model.get_output_embeddings())
    return model.eval().requires_grad_(False)


def cache_argument(model: PreTrainedModel) -> str:
    """Name of the argument of a model's forward that takes its KV cache: transformers is renaming it."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


def load_tokenizer(
    folder: str | Path, chat_template: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """The target's tokenizer; `chat_template`, a Jinja file, replaces its own template.

    Raises:
        ValueError: no chat template at all, no such file, or a tokenizer that cannot be loaded.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    except Exception as e:  # the library's own, of every kind, from damaged files
        raise ValueError(f"{folder}: its tokenizer cannot be loaded ({type(e).__name__}: {e}): {REFETCH}") from e
    if chat_template is not None:
        tokenizer.chat_template = _template_text(Path(chat_template))
    if not tokenizer.chat_template:
        raise ValueError(f"{folder}: the tokenizer has no chat template; give one: target.chat_template=FILE.jinja")
    return tokenizer


def tokenizer_files(folder: str | Path, chat_template: str | None = None) -> dict[str, bytes]:
    """File name -> content of all that `load_tokenizer` needs, with the chat template in use."""
    names = (*TOKENIZER_FILES, *TOKENIZER_SETTINGS)
    files = {name: file.read_bytes() for name in names if (file := Path(folder) / name).is_file()}
    if chat_template is not None:
        files[TEMPLATE_FILE] = _template_text(Path(chat_template)).encode()
    return files


def _template_text(path: Path) -> str:
    path = path.expanduser()
    if not path.is_file():
        raise ValueError(f"target.chat_template={path}: no such file")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise ValueError(f"{path} is no chat template: its text is not UTF-8 ({e})") from e


def read_config(folder: str | Path) -> dict[str, Any]:
    """The target's config.json. ValueError where it is damaged."""
    return read_object(Path(folder) / "config.json", REFETCH)


def text_config(folder: str | Path) -> dict[str, Any]:
    """The language model's part of the target's config.json: multi-modal models keep it inside.

    Raises:
        ValueError: without the sizes that all else is planned by.
    """
    config = read_config(folder)
    config = config.get("text_config", config)
    for size in ("num_hidden_layers", "hidden_size", "vocab_size"):
        value = config.get(size) if isinstance(config, dict) else None
        if type(value) is not int or value < 1:
            raise ValueError(f"{Path(folder) / 'config.json'}: {size} is {value!r} and no number: {REFETCH}")
    return dict(config)


def stop_ids(folder: str | Path, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids that end the target's turn, ascending: its generation configuration's and the tokenizer's own.

    Raises:
        ValueError: there is none, so that generation would never stop.
    """
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = Path(folder) / name
        ids = read_object(path, REFETCH).get("eos_token_id") if path.is_file() else None
        found |= set(ids) if isinstance(ids, list) else ({ids} if ids is not None else set())
    if tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    if not found:
        raise ValueError(f"{folder}: neither generation_config.json nor the tokenizer names an end-of-sequence token")
    return sorted(found)


def weight_hash(folder: str | Path) -> str:
    """Hex digest of the target's weights and configuration; the split into files and the file order do not count."""
    folder = Path(folder)
    files = sorted(folder.glob("*.safetensors"))
    digests = [d for file in files for d in _tensor_digests(file)]
    if not files:
        digests = [f"{file.name} {file_digest(file)}" for file in sorted(folder.glob("*.bin"))]
    if not digests:
        raise ValueError(f"{folder} holds no weights (*.safetensors or *.bin)")
    config = read_config(folder)
    for volatile in ("transformers_version", "_name_or_path"):
        config.pop(volatile, None)
    return _digest("\n".join([json.dumps(config, sort_keys=True), *sorted(digests)]))


def _tensor_digests(file: Path) -> list[str]:
    """`name dtype shape sha256` of each tensor of a safetensors file: an 8-byte length, a JSON header, the data."""
    base, header = _header(file)
    with open(file, "rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data, memoryview(data) as view:

        def digest(name: str) -> str:
            entry = header[name]
            start, end = entry["data_offsets"]
            with view[base + start : base + end] as raw:
                return f"{name} {entry['dtype']} {entry['shape']} {hashlib.sha256(raw).hexdigest()}"

        with ThreadPoolExecutor(os.cpu_count()) as pool:  # hashing releases the interpreter's lock
            return list(pool.map(digest, header))


def _header(file: Path) -> tuple[int, dict[str, Any]]:
    """Where the data of a safetensors file begin, and what its header says of each tensor. ValueError where the file is
    cut: the header says how long it is."""
    size = file.stat().st_size
    header: dict[str, Any] = {}
    with open(file, "rb") as f:
        base = 8 + int.from_bytes(f.read(8), "little")
        try:
            header = json.loads(f.read(base - 8)) if 8 < base <= size else {}
            header.pop("__metadata__", None)
            wanted = base + max(entry["data_offsets"][1] for entry in header.values())
        except (ValueError, KeyError, TypeError, AttributeError):  # no JSON, no tensors, or no object
            wanted = None
    if wanted != size:
        raise ValueError(f"{file} is cut or damaged ({size:,} bytes): fetch the target's weights again")
    return base, header


def tokenizer_hash(folder: str | Path) -> str:
    """Hex digest of what maps text to token ids: vocabulary, merges, special tokens. The chat template has its own."""
    parts = [f"{name} {file_digest(file)}" for name in TOKENIZER_FILES if (file := Path(folder) / name).is_file()]
    if not parts:
        raise ValueError(f"{folder} holds no tokenizer ({', '.join(TOKENIZER_FILES)})")
    config = _tokenizer_config(folder)
    special = {k: v for k, v in config.items() if k.endswith("_token") or k.startswith("add")}
    return _digest("\n".join([*parts, json.dumps(special, sort_keys=True)]))


def chat_template_hash(folder: str | Path, chat_template: str | None = None) -> str:
    """Hex digest of the chat template in use: the file `chat_template`, or the tokenizer's own."""
    own = Path(folder) / TEMPLATE_FILE
    if chat_template is not None:
        return _digest(_template_text(Path(chat_template)))
    if own.is_file():
        return _digest(_template_text(own))
    return _digest(json.dumps(_tokenizer_config(folder).get("chat_template")))


def _tokenizer_config(folder: str | Path) -> dict[str, Any]:
    path = Path(folder) / "tokenizer_config.json"
    return read_object(path, REFETCH) if path.is_file() else {}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
