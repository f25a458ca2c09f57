"""Weights are told by their content, wherever and in how many files they lie."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from vllm_pd_connector import content
from vllm_pd_connector.content import adapter_digest, checkpoint_digest

TENSORS = {f"layers.{i}.weight": np.random.default_rng(i).random((300, 100), dtype=np.float32) for i in range(4)}


def write(directory: Path, tensors: Mapping[str, np.ndarray], files: int = 1) -> Path:
    """A checkpoint of one file, or of several and their index."""
    directory.mkdir()
    names = sorted(tensors)
    places = {
        name: f"model-{i % files}.safetensors" if files > 1 else "model.safetensors" for i, name in enumerate(names)
    }
    for file in set(places.values()):
        save_file({name: tensors[name] for name in names if places[name] == file}, directory / file)
    if files > 1:
        (directory / content.INDEX).write_text(json.dumps({"weight_map": places}))
    return directory


def test_a_checkpoint_is_its_tensors_in_whatever_files(tmp_path: Path) -> None:
    one, three = (checkpoint_digest(write(tmp_path / str(files), TENSORS, files)) for files in (1, 3))
    assert one == three
    assert one is not None and len(one) == 16


def test_files_that_vllm_does_not_load_do_not_count(tmp_path: Path) -> None:
    plain = write(tmp_path / "plain", TENSORS)
    more = write(tmp_path / "more", TENSORS, files=2)
    save_file({"merged": np.zeros(3)}, more / "merged.safetensors")
    (more / "pytorch_model.bin").write_bytes(b"in another form")
    (more / "README.md").write_text("a model")
    assert checkpoint_digest(plain) == checkpoint_digest(more)
    pickled = [tmp_path / name for name in ("alone", "trained")]
    for directory in pickled:
        directory.mkdir()
        (directory / "pytorch_model.bin").write_bytes(b"weights")
    (pickled[1] / "training_args.bin").write_bytes(b"optimizer")
    assert checkpoint_digest(pickled[0]) == checkpoint_digest(pickled[1]) != checkpoint_digest(plain)


def test_what_lies_in_two_forms_is_told_by_the_one_that_vllm_loads(tmp_path: Path) -> None:
    """Mistral's repositories have weights twice, and a tuner may write one form: the other is still the base's."""
    trained = {name: tensor + 1 for name, tensor in TENSORS.items()}
    base, tuned = write(tmp_path / "base", TENSORS, files=2), write(tmp_path / "tuned", trained, files=2)
    both = shutil.copytree(tuned, tmp_path / "both")
    save_file(TENSORS, both / "consolidated.safetensors")
    (both / "old.pt").write_bytes(b"older still")
    assert checkpoint_digest(both) == checkpoint_digest(both, "mistral") == checkpoint_digest(base)
    for form in ("hf", "safetensors", "fastsafetensors", "sharded_state"):
        assert checkpoint_digest(both, form) == checkpoint_digest(tuned) != checkpoint_digest(base), form
    (alone := tmp_path / "alone").mkdir()
    shutil.copy(both / "old.pt", alone)
    assert checkpoint_digest(both, "pt") == checkpoint_digest(alone)


def test_of_mistrals_files_those_are_told_that_its_index_names(tmp_path: Path) -> None:
    digests = []
    for named in (1, 2):
        (directory := tmp_path / str(named)).mkdir()
        names = [f"consolidated-{i}.safetensors" for i in range(2)]
        for i, name in enumerate(names):
            save_file({f"layers.{i}": np.zeros(30, dtype=np.float32)}, directory / name)
        index = {"weight_map": {f"layers.{i}": name for i, name in enumerate(names[:named])}}
        (directory / content.MISTRALS_INDEX).write_text(json.dumps(index))
        digests.append(checkpoint_digest(directory))
    assert digests[0] != digests[1]


def test_files_that_no_index_names_are_all_told(tmp_path: Path) -> None:
    """vLLM loads all of them, also beside one that has the name of the whole."""
    whole, more = write(tmp_path / "whole", TENSORS), write(tmp_path / "more", TENSORS)
    save_file({"mtp.weight": np.zeros(3)}, more / "mtp.safetensors")
    assert checkpoint_digest(whole) != checkpoint_digest(more)


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_of_other_numbers_is_another_checkpoint(tmp_path: Path, name: str) -> None:
    trained = {**TENSORS, name: TENSORS[name] * np.float32(1.001)}
    assert checkpoint_digest(write(tmp_path / "a", TENSORS)) != checkpoint_digest(write(tmp_path / "b", trained))


@pytest.mark.parametrize("change", [lambda x: x.reshape(100, 300), lambda x: x.view(np.int32)])
def test_a_tensor_of_another_shape_or_type_is_another_checkpoint(tmp_path: Path, change) -> None:
    first, *_ = TENSORS
    other = {**TENSORS, first: change(TENSORS[first])}
    assert checkpoint_digest(write(tmp_path / "a", TENSORS)) != checkpoint_digest(write(tmp_path / "b", other))


def test_of_many_tensors_some_are_read_and_all_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "MAX_SAMPLES", 2)
    names = list(TENSORS)
    again = {**TENSORS, names[0]: TENSORS[names[0]] + 1}
    fewer = {name: TENSORS[name] for name in names[:3]}
    digests = [checkpoint_digest(write(tmp_path / str(i), each)) for i, each in enumerate((TENSORS, again, fewer))]
    assert len(set(digests)) == 3


def test_files_of_other_kinds_are_told_by_pieces(tmp_path: Path) -> None:
    found = set()
    for last in range(2):
        directory = tmp_path / str(last)
        directory.mkdir()
        (directory / "pytorch_model.bin").write_bytes(bytes(100_000) + bytes([last]) * 4000)
        found.add(checkpoint_digest(directory))
        found.add(checkpoint_digest(directory / "pytorch_model.bin"))
    assert len(found) == 2


def test_where_no_weights_are_nothing_is_told(tmp_path: Path) -> None:
    assert checkpoint_digest(tmp_path) is None
    assert checkpoint_digest(tmp_path / "missing") is None
    assert adapter_digest(tmp_path) is None


@pytest.mark.parametrize(
    "damaged", [b"", b"\xff" * 40, (9).to_bytes(8, "little") + b'{"a": {}}', b"\2" + bytes(7) + b"[]"]
)
def test_a_file_that_is_not_what_its_name_says_is_refused(tmp_path: Path, damaged: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(damaged)
    with pytest.raises(ValueError, match="safetensors"):
        checkpoint_digest(tmp_path)


def test_an_adapter_is_every_byte_of_its_files(tmp_path: Path) -> None:
    for name in ("one", "copy", "trained", "scaled"):
        write(tmp_path / name, {}).joinpath("adapter_config.json").write_text('{"r": 8, "lora_alpha": 16}')
        (tmp_path / name / "adapter_model.safetensors").write_bytes(bytes(10_000))
    (tmp_path / "copy" / "README.md").write_text("an adapter")
    with (tmp_path / "trained" / "adapter_model.safetensors").open("r+b") as file:
        file.seek(7777)
        file.write(b"\1")
    (tmp_path / "scaled" / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 32}')
    digests = {name: adapter_digest(tmp_path / name) for name in ("one", "copy", "trained", "scaled")}
    assert digests["one"] == digests["copy"]
    assert len(set(digests.values())) == 3
    shutil.rmtree(tmp_path / "one")
    assert adapter_digest(tmp_path / "one") is None
