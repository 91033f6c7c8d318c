import inspect

import pydantic
import pytest

from deepinfra.schedulers import Bucketed, BucketedOptions, Fcfs, FcfsOptions


@pytest.mark.parametrize(("part", "options"), [(Fcfs, FcfsOptions), (Bucketed, BucketedOptions)])
def test_options_have_the_parts_own_keywords_and_defaults(part: type, options: type[pydantic.BaseModel]):
    keywords = {name: p.default for name, p in inspect.signature(part).parameters.items()}
    assert options().model_dump() == keywords


@pytest.mark.parametrize("edges", [(5, 5), (9, 3), (0, 4)])
def test_edges_that_do_not_ascend_are_refused(edges: tuple[int, ...]):
    with pytest.raises(pydantic.ValidationError):
        BucketedOptions(edges=edges)
