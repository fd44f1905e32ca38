"""Against Hugging Face in the same process, on sequences made up here; where torch is installed."""

import numpy as np
import pytest

from tests.conftest import TINY_LM
from tests.models.hf_parity import (
    RANDOM_MODELS,
    SMALL_MODEL_TOLERANCE,
    dense_logits,
    device_params,
    load_random_model,
)

torch = pytest.importorskip("torch", reason="the live comparison needs torch: pip install torch")
transformers = pytest.importorskip("transformers")

SEEDS = (11, 12)


@pytest.mark.parametrize("folder", [*RANDOM_MODELS, TINY_LM], ids=lambda folder: folder.name)
def test_logits_are_those_of_hugging_face_in_this_process(folder):
    model = load_random_model(folder)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    params = device_params(model)
    length = model.config.max_position_embeddings - 1
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        tokens = rng.integers(0, model.config.vocab_size, (1, length), np.int32)
        with torch.no_grad():
            theirs = reference(torch.from_numpy(tokens).long()).logits.numpy()
        ours = dense_logits(model.config, params, tokens)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=SMALL_MODEL_TOLERANCE)
