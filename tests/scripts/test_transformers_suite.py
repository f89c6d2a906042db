"""`scripts.checks.transformers_suite` on made-up folders of sources: the package that is installed, and tests of ours."""

from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers", reason="needs transformers 5.17 or later")

from scripts.checks import transformers_suite as suite  # noqa: E402

SENTINELS = """
import torch
from transformers.integrations.moe import batched_mm_experts_forward
from tests.integrations.families import experts_alone

def test_a_pair_elsewhere_adds_nothing():
    experts = experts_alone("mixtral", "modeling_mixtral.MixtralExperts")
    x, scores = torch.randn(3, 32), torch.zeros(3, 1)
    assert not batched_mm_experts_forward(experts, x, torch.full((3, 1), 4), scores).any()

def test_what_we_fail_is_told():
    test_a_pair_elsewhere_adds_nothing()
    assert 1 == 2

def test_what_fails_without_us_is_theirs():
    raise ValueError("no such\\nthing")
"""
MODELS = """
import pytest
from transformers.integrations.moe import batched_mm_experts_forward

def test_eager_matches_batched_and_grouped_inference_fp32():
    pytest.skip("not today")

def test_of_another_kind():
    raise ValueError
"""
COMMON = """
from .exporters.test_export import ExportTesterMixin
from .generation.test_utils import GenerationTesterMixin
from transformers.integrations.moe import batched_mm_experts_forward

def _test_eager_matches_batched_and_grouped_inference(self, name, dtype):
    config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
    self.assertEqual(config.model_type, self.all_model_classes[0].config_class.model_type)
    if dtype == "fp16":
        self.skipTest("no fp16")
    assert "Mock" in repr(batched_mm_experts_forward) and dtype == "fp32", "ours is not there"
"""


def folder_with(place: Path, files: dict[str, str]) -> Path:
    """A source folder of the version that is installed."""
    (place / "src").mkdir()
    (place / "src/transformers").symlink_to(Path(transformers.__file__).parent)
    for name, text in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    return place


def run(folder: Path, log: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.argv", ["", str(folder), "--log", str(log)])
    with pytest.raises(SystemExit) as end:
        suite.main()
    return int(end.value.code or 0)


@pytest.mark.full
def test_a_line_a_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = "tests/models/mixtral/test_modeling_mixtral.py"
    folder = folder_with(
        tmp_path, {str(suite.SENTINELS): SENTINELS, models: MODELS, "tests/models/bert/test_x.py": "1 / 0"}
    )
    log = tmp_path / "a.log"
    log.write_text("# transformers 1.2.3: kept\n\n## a part\n\n# transformers " + transformers.__version__ + ": old\n")
    assert run(folder, log, monkeypatch) == 1
    text = log.read_text()
    assert "# transformers 1.2.3: kept\n\n## a part\n" in text and ": old" not in text
    lines = [line for line in text.splitlines() if "::" in line]
    assert [line.split()[0] for line in lines] == ["passed", "failed", "theirs", "skipped"]
    assert "experts 1, moe_mlp 1" in lines[0] and "experts 1, moe_mlp 1  assert 1 == 2" in lines[1]
    assert lines[2].endswith("experts 0, moe_mlp 0  ValueError: no such thing") and lines[3].endswith("not today")
    assert "## sentinels: 1 failed, 1 passed, 1 theirs; passed by moe_mlp 1, by grouped_mm 0" in text


@pytest.mark.full
def test_the_function_runs_on_tiny_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "a.log"
    assert run(folder_with(tmp_path, {str(suite.COMMON): COMMON}), log, monkeypatch) == 1, "no moe_mlp in it"
    lines = log.read_text().splitlines()
    outcomes = [line.split()[0] for line in lines if ", fp" in line or ", bf" in line]
    assert len(outcomes) > 30 and outcomes == ["passed", "skipped", "theirs"] * (len(outcomes) // 3)
    assert any(line.startswith("passed   qwen3_moe, fp32") for line in lines)


def test_other_folders_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        suite.arguments([str(tmp_path)])
    assert "folder: expected one with src/transformers" in capsys.readouterr().err
    assert suite.parts(folder_with(tmp_path, {})) == {}
