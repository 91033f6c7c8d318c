"""Options say what the constructors say."""

from __future__ import annotations

import inspect

import pytest
from pydantic import BaseModel, ValidationError

from deepinfra.kvstores import MemoryStore, SsdStore, TieredStore
from deepinfra.kvstores.options import MemoryStoreOptions, SsdStoreOptions, TieredStoreOptions

PAIRS = [(MemoryStore, MemoryStoreOptions), (SsdStore, SsdStoreOptions), (TieredStore, TieredStoreOptions)]


@pytest.mark.parametrize(("store", "options"), PAIRS)
def test_options_have_the_names_and_defaults_of_the_constructor(store: type, options: type[BaseModel]) -> None:
    parameters = list(inspect.signature(store).parameters.values())
    assert [p.name for p in parameters] == list(options.model_fields)
    for parameter in parameters:
        if parameter.default is not inspect.Parameter.empty:
            assert options.model_fields[parameter.name].default == parameter.default


@pytest.mark.parametrize(("store", "options"), PAIRS)
def test_every_option_is_described_and_others_are_refused(store: type, options: type[BaseModel]) -> None:
    assert all(field.description for field in options.model_fields.values())
    with pytest.raises(ValidationError):
        options(capacity=1)
    with pytest.raises(ValidationError):
        options(capacity_nbytes=0)


@pytest.mark.parametrize(("path", "why"), [("~nobody-of-this-name/kv", "no user's home"), ("/tmp/\0kv", "no NUL")])
def test_a_folder_that_cannot_be_is_refused_by_name(path: str, why: str) -> None:
    with pytest.raises(ValidationError, match=f"(?s)path.*{why}"):
        SsdStoreOptions(path=path)
