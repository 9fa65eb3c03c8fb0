"""Targets that tests share: the real embedded one, converted once, and a tiny random one."""

from __future__ import annotations

import fcntl
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle3_train.config import TargetConfig, compose

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MakeTokenizer = Callable[..., object]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background jobs deaf to Ctrl-C, and children inherit that: tests that send one would wait for ever.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def real_target(pytestconfig: pytest.Config) -> Path:
    """The embedded target as a plain folder, in pytest's cache: later runs convert nothing. Safe under xdist."""
    from eagle3_train.files import file_fingerprint, find_package_file
    from eagle3_train.target import prepare_target

    target: TargetConfig = compose(["target=smollm2"]).target
    cache = pytestconfig.cache.mkdir("eagle3-target")  # type: ignore[union-attr]
    folder = cache / file_fingerprint(find_package_file(target.model))[:16]
    with open(cache / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return prepare_target(target, folder)


@pytest.fixture(scope="session")
def make_tokenizer() -> MakeTokenizer:
    """Build a byte-level tokenizer: 256 bytes, a few merged words, and the special tokens given."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    def make(
        template: str = CHATML, special: tuple[str, ...] = ("<|im_start|>", "<|im_end|>"), eos: str = "<|im_end|>"
    ):  # type: ignore[no-untyped-def]
        raw = Tokenizer(models.BPE())
        raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        raw.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        words = ["hello world the answer is the question is", "hello the answer"] * 4
        raw.train_from_iterator(
            words, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
        )
        raw.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=eos, pad_token=eos)
        tokenizer.chat_template = template
        return tokenizer

    return make


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory, make_tokenizer: MakeTokenizer) -> Path:
    """A random Llama of eight layers and H 32, with a byte-level ChatML tokenizer, as a plain folder."""
    return save_tiny_llama(tmp_path_factory.mktemp("tiny-target"), make_tokenizer(), hidden_size=32, head_dim=8)


def save_tiny_llama(folder: Path, tokenizer: Any, hidden_size: int, head_dim: int) -> Path:
    """A random Llama of eight layers and its tokenizer, as a plain folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=8,
        num_attention_heads=hidden_size // head_dim,
        num_key_value_heads=hidden_size // head_dim // 2,
        head_dim=head_dim,
        max_position_embeddings=2048,
        initializer_range=0.3,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """HOST:PORT of a real S3 server on loopback."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"{host}:{port}"
    server.stop()


@pytest.fixture
def uri(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """Of a folder in a bucket of this test's own."""
    import pyarrow.fs as pafs

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    bucket = request.node.name.replace("_", "-").lower()[:50]
    server = {"endpoint_override": s3_endpoint, "scheme": "http", "region": "us-east-1"}
    pafs.S3FileSystem(**server, allow_bucket_creation=True).create_dir(bucket)
    return f"s3://{bucket}/store?{'&'.join(f'{key}={value}' for key, value in server.items())}"
