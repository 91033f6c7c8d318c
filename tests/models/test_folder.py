from __future__ import annotations

from typing import Any

import pytest

from deepinfra.errors import ModelError, UnsupportedModelError
from deepinfra.models import open_model


def test_a_folder_opens_by_its_path(tiny: Any) -> None:
    folder = tiny.hf_folder(shards=2)
    model = open_model(str(folder))
    assert (model.name, model.path, model.config["model_type"]) == (str(folder), folder, "llama")
    assert len(model.tensors.names()) == 4


def test_its_tokenizer_is_the_one_in_the_folder(tiny: Any) -> None:
    tokenizer = open_model(str(tiny.hf_folder())).tokenizer()
    assert tokenizer.encode("</s>").ids == [256, 257]


def test_its_special_tokens_come_from_tokenizer_config_and_generation_config(tiny: Any) -> None:
    special = open_model(str(tiny.hf_folder())).special_tokens()
    assert (special.bos_id, special.bos_token, special.eos_id, special.eos_token) == (256, "<s>", 257, "</s>")
    assert special.eos_ids == {257, 258, 259}
    assert special.control_ids == {256, 257, 258, 259}
    assert special.marker_ids == {260}
    assert special.add_bos


def test_its_generation_defaults_are_those_of_the_folder(tiny: Any) -> None:
    folder = tiny.hf_folder()
    assert open_model(str(folder)).generation_defaults()["temperature"] == 0.6
    (folder / "generation_config.json").unlink()
    assert open_model(str(folder)).generation_defaults() == {}


def test_a_template_file_wins_over_the_config(tiny: Any) -> None:
    folder = tiny.hf_folder()
    assert open_model(str(folder)).chat_template() == "{{ bos_token }}"
    (folder / "chat_template.jinja").write_text("{{ 1 }}")
    assert open_model(str(folder)).chat_template() == "{{ 1 }}"


def test_of_several_templates_the_default_is_taken(tiny: Any) -> None:
    folder = tiny.hf_folder()
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]
    tiny.json(folder / "tokenizer_config.json", {"chat_template": named})
    assert open_model(str(folder)).chat_template() == "yes"


def test_a_model_without_a_template_says_so(tiny: Any) -> None:
    folder = tiny.hf_folder()
    (folder / "tokenizer_config.json").unlink()
    assert open_model(str(folder)).chat_template() is None


@pytest.mark.parametrize("field", ["auto_map", "trust_remote_code", "custom_pipelines"])
def test_code_that_comes_with_a_model_is_refused_by_name(tiny: Any, field: str) -> None:
    folder = tiny.hf_folder(config={field: {"AutoModel": "modeling.Own"}})
    with pytest.raises(UnsupportedModelError, match=field):
        open_model(str(folder))


def test_a_tokenizer_with_its_own_code_is_refused_by_name(tiny: Any) -> None:
    folder = tiny.hf_folder()
    tiny.json(folder / "tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["tok.Own", None]}})
    with pytest.raises(UnsupportedModelError, match="auto_map"):
        open_model(str(folder)).tokenizer()


@pytest.mark.parametrize("text", ["{", "[]", "null", '"x"', "[" * 100_000, "\ufffe"])
def test_a_damaged_config_is_refused(tiny: Any, text: str) -> None:
    folder = tiny.hf_folder()
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelError, match="damaged"):
        open_model(str(folder))


@pytest.mark.parametrize("text", ["{}", "not json", '{"version": "1.0", "model": {"type": "Own"}}'])
def test_a_damaged_tokenizer_is_refused(tiny: Any, text: str) -> None:
    folder = tiny.hf_folder()
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(ModelError, match="damaged"):
        open_model(str(folder)).tokenizer()


def test_a_missing_tokenizer_is_named(tiny: Any) -> None:
    folder = tiny.hf_folder()
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        open_model(str(folder)).tokenizer()


def test_a_config_of_absurd_size_is_not_read(tiny: Any) -> None:
    folder = tiny.hf_folder()
    with (folder / "config.json").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(ModelError, match="larger than"):
        open_model(str(folder))


def test_wrong_end_tokens_are_refused(tiny: Any) -> None:
    folder = tiny.hf_folder(config={"eos_token_id": ["x"]})
    with pytest.raises(ModelError, match="eos_token_id"):
        open_model(str(folder)).special_tokens()
