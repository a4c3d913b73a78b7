"""The script: what it lists, leaves and says; the grids that exist; and one real ablation."""

import json
from pathlib import Path

import pytest

from benchmarks import ablate
from benchmarks.ablations.runs import plan, read_grid
from mm_utils.distributed import RunError
from mm_utils.model.build import ModelArguments, build_model
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.model.processor import train_tokenizer
from scripts import pretrain
from tests.benchmarks.grids import started, write_grid

GRIDS = sorted((Path(__file__).parents[2] / "benchmarks/ablations").glob("*.yaml"))
GRID = "common: {max_steps: 2}\nvariants: {base: , better: {recall: 0.75}}\n"


def test_tables_and_a_picture_are_left_behind(tmp_path, launcher, capsys):
    flags = ["--grid", write_grid(tmp_path, GRID), "--seeds", "2", "--output_dir", str(tmp_path / "out")]
    flags += ["--launcher", launcher, "--metrics", "recall@1,matching_lift,absent"]
    found = ablate.main(flags)
    assert found["better/recall@1"] == pytest.approx(0.755)
    assert found["base/matching_lift"] == 0.2
    table = (tmp_path / "out/ablation.md").read_text()
    assert "| better | **+0.250 ± 0.000** | +0.000 ± 0.000 |" in table
    assert capsys.readouterr().out.strip() in table
    content = json.loads((tmp_path / "out/ablation.json").read_text())
    assert content["variants"]["better"]["metrics"]["recall@1"]["values"] == {"0": 0.75, "1": 0.76}
    assert (tmp_path / "out/ablation.png").stat().st_size > 0
    assert ablate.main(flags) == found
    assert len(started(tmp_path / "out")) == 4


def test_a_failed_run_is_in_the_end_an_error_beside_the_table(tmp_path, launcher):
    grid = "common: {max_steps: 2}\nvariants: {base: , broken: {fails: 1}}\n"
    flags = ["--grid", write_grid(tmp_path, grid), "--seeds", "1", "--output_dir", str(tmp_path / "out")]
    with pytest.raises(RunError, match=r"1 of 2 runs failed: .*broken-seed0"):
        ablate.main([*flags, "--launcher", launcher, "--metrics", "recall@1"])
    assert "| base |" in (tmp_path / "out/ablation.md").read_text()
    [why] = json.loads((tmp_path / "out/ablation.json").read_text())["failed"].values()
    assert "no memory" in why


@pytest.mark.parametrize("path", GRIDS, ids=lambda path: path.stem)
def test_training_takes_all_flags_of_a_grid(path, monkeypatch):
    class Parsed(Exception):
        pass

    def stop(name, *parsed, **kwargs):
        raise Parsed

    monkeypatch.setattr(pretrain, "start_run", stop)
    common, variants = read_grid(str(path))
    assert path.read_text().startswith(f"# python -m benchmarks.ablate --grid benchmarks/ablations/{path.name} ")
    for run in plan(common, variants, 1, "out"):
        with pytest.raises(Parsed):
            pretrain.main(run.command("python")[2:])


def test_flat_and_hierarchical_heads_are_of_one_size():
    common, variants = read_grid(str(GRIDS[0].parent / "fusion.yaml"))
    tokenizer = train_tokenizer(["a b"], 50)

    def head(variant: str) -> int:
        flags = {name: value for name, value in (common | variants[variant]).items() if name.startswith("fusion_")}
        model = build_model(ModelArguments(**flags), tokenizer)
        assert isinstance(model, FusionDualEncoderModel)
        return sum(parameter.numel() for parameter in model.fusion.parameters())

    assert head("flat") == pytest.approx(head("hierarchical"), rel=0.02)


@pytest.mark.slow
def test_a_real_ablation(tmp_path, tiny_flags, capsys):
    flags = [f"{name[2:]}: {value}" for name, value in zip(tiny_flags[::2], tiny_flags[1::2], strict=True)]
    common = "common:\n" + "".join(f"  {flag}\n" for flag in flags)
    variants = "variants:\n  fused: {objectives: 'contrastive:1,matching:1'}\n  towers: {objectives: 'contrastive:1', fusion_layers: 0}\n"
    grid = write_grid(tmp_path, common + variants)
    arguments = ["--grid", grid, "--seeds", "2", "--max_steps", "2", "--output_dir", str(tmp_path / "out")]
    arguments += ["--metrics", "rerank_text_to_image_recall@1,image_effective_rank"]
    found = ablate.main(arguments)
    assert 0 <= found["fused/rerank_text_to_image_recall@1"] <= 1
    assert "towers/rerank_text_to_image_recall@1" not in found
    content = json.loads((tmp_path / "out/ablation.json").read_text())["variants"]
    assert content["towers"]["parameters"] < content["fused"]["parameters"]
    values = content["fused"]["metrics"]["image_effective_rank"]["values"]
    assert values["0"] != values["1"]
    assert ablate.main(arguments) == found
