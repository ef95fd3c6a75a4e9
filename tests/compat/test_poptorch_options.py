"""Options: chained, frozen once they are used, cloned, read from files; what is accepted and what is refused."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps
import penstock.compat.poptorch as poptorch
from tests.compat.poptorch_models import STAGES, Net, data, made
from tests.compat.poptorch_models import plainly as plainly


def test_settings_are_chained_and_read() -> None:
    options = poptorch.Options().deviceIterations(10).replicationFactor(2).randomSeed(7)
    assert options.Training.gradientAccumulation(4) is options.Training
    assert (options.device_iterations, options.replication_factor, options.random_seed) == (10, 2, 7)
    assert options.Training.gradient_accumulation == 4
    assert options.Training.accumulation_and_replication_reduction_type == poptorch.ReductionType.Mean
    assert options.output_mode == poptorch.OutputMode.Default
    assert options.outputMode(poptorch.OutputMode.All).output_mode == 2
    assert options.setExecutionStrategy(STAGES).execution_strategy is STAGES
    place = poptorch.TensorLocationSettings().useOnChipStorage(False)
    assert repr(options.TensorLocations.setOptimizerLocation(place)) == (
        "_TensorLocationOptions(location_optimizer={'onChip': 0})"
    )
    assert "gradient_accumulation=4" in repr(options)
    assert "device_iterations=10" in repr(options)
    assert options.toDict()["Training"]["gradient_accumulation"] == 4


def use_in_loader(options: poptorch.Options) -> None:
    poptorch.DataLoader(options, torch.utils.data.TensorDataset(torch.zeros(4)))


def use_in_training(options: poptorch.Options) -> None:
    poptorch.trainingModel(nn.Linear(1, 1), options)


def use_in_inference(options: poptorch.Options) -> None:
    poptorch.inferenceModel(nn.Linear(1, 1), options)


@pytest.mark.parametrize("use", [use_in_loader, use_in_training, use_in_inference])
def test_options_are_frozen_once_they_are_used(use: Any) -> None:
    options = poptorch.Options().deviceIterations(2)
    use(options)
    changes: list[Any] = [
        lambda o: o.deviceIterations(3),
        lambda o: o.Training.gradientAccumulation(2),
        lambda o: o.TensorLocations.setWeightLocation(poptorch.TensorLocationSettings()),
        lambda o: o.outputMode(poptorch.OutputMode.All),
        lambda o: o._Popart.set("autoRecomputation", 1),
        lambda o: setattr(o, "device_iterations", 3),
    ]
    for change in changes:
        with pytest.raises(AttributeError, match="Can't modify frozen Options"):
            change(options)
        with pytest.raises(ps.PlanError):
            change(options)
    for copied in (options.clone(), copy.deepcopy(options), pickle.loads(pickle.dumps(options))):
        for change in changes[:-1]:
            change(copied)
        assert copied.device_iterations == 3
        assert copied.Training.gradient_accumulation == 2
    assert options.device_iterations == 2
    assert options.Training.gradient_accumulation == 1


def test_clones_are_independent() -> None:
    options = poptorch.Options().setExecutionStrategy(poptorch.PipelinedExecution("B1", "B2"))
    clone = options.clone()
    clone.execution_strategy.stage("B1").ipu(5)
    clone.Training.gradientAccumulation(3)
    assert options.execution_strategy.stage("B1")._ipu is None
    assert options.Training.gradient_accumulation == 1


def test_values_are_set_by_methods() -> None:
    with pytest.raises(AttributeError, match="set by methods"):
        poptorch.Options().device_iterations = 3
    with pytest.raises(AttributeError, match="has no"):
        poptorch.Options().Training.gradientAcumulation(3)


def test_settings_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "options.conf"
    file.write_text(
        "# of a run\n\ndeviceIterations(4)\nTraining.gradientAccumulation(8)  # micro-batches\n"
        "setExecutionStrategy(poptorch.ShardedExecution(poptorch.Stage('B1').ipu(1), 'B2'))\n"
        "outputMode(poptorch.OutputMode.EveryN, output_return_period=2)\n"
    )
    options = poptorch.Options().loadFromFile(str(file))
    assert (options.device_iterations, options.Training.gradient_accumulation) == (4, 8)
    assert repr(options.execution_strategy) == "ShardedExecution(Stage('B1').ipu(1), Stage('B2'))"
    assert (options.output_mode, options.output_return_period) == (poptorch.OutputMode.EveryN, 2)
    for wrong in ("deviceIterations(0)", "deviceIteration(4)", "__import__('os')", "deviceIterations("):
        file.write_text(f"\n{wrong}\n")
        with pytest.raises(poptorch.Error, match="line 2"):
            poptorch.Options().loadFromFile(str(file))


def test_settings_from_json() -> None:
    text = '{"deviceIterations": 4, "outputMode": [1, 2], "Training.gradientAccumulation": 8}'
    options = poptorch.Options().from_json(text)
    assert (options.device_iterations, options.Training.gradient_accumulation) == (4, 8)
    assert options.output_mode == poptorch.OutputMode.EveryN
    for wrong in ('{"deviceIteration": 4}', '{"_set": 4}', '{"Training.lr": 4}'):
        with pytest.raises(poptorch.Error, match="there is no setting"):
            poptorch.Options().from_json(wrong)


OFF_CHIP = poptorch.TensorLocationSettings().useOnChipStorage(False)

ACCEPTED: list[Any] = [
    lambda o: o.autoRoundNumIPUs(True),
    lambda o: o.setAvailableMemoryProportion({"IPU0": 0.4}),
    lambda o: o.connectionType(poptorch.ConnectionType.OnDemand),
    lambda o: o.enableExecutableCaching("cache"),
    lambda o: o.showCompilationProgressBar(False),
    lambda o: o.useIpuModel(False),
    lambda o: o.broadcastBuffers(False),
    lambda o: o.modelName("net"),
    lambda o: o.disableModuleNamescope(),
    lambda o: o.Precision.setPartialsType(torch.half),
    lambda o: o.Precision.enableStochasticRounding(True),
    lambda o: o.Precision.enableFloatingPointExceptions(False),
    lambda o: o.Precision.halfFloatCasting(poptorch.HalfFloatCastingBehavior.Default),
    lambda o: o.Jit.traceModel(True),
    lambda o: o.Distributed.configureProcessId(0, 1),
    lambda o: o.Distributed.disable(),
    lambda o: o.Training.setMeanAccumulationAndReplicationReductionStrategy(poptorch.MeanReductionStrategy.Running),
    lambda o: o.TensorLocations.numIOTiles(32),
    lambda o: o.enableSyntheticData(False),
    lambda o: o.TensorLocations.setAccumulatorLocation(poptorch.TensorLocationSettings().useOnChipStorage(True)),
]


def test_settings_without_effect_warn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    options = poptorch.Options()
    monkeypatch.setattr("penstock.compat.poptorch.options._warned", set())
    with pytest.warns(UserWarning, match="has no effect here") as seen:
        assert all(accept(options) is not None for accept in (*ACCEPTED, *ACCEPTED))
    told = [str(warning.message) for warning in seen]
    assert "poptorch.Options: autoRoundNumIPUs has no effect here" in told
    assert len(set(told)) == len(told)  # once for each
    assert seen[0].filename == __file__
    model = made()
    expected = model(data(4)[0])
    model.eval()
    plain = model(data(4)[0])
    options.setExecutionStrategy(poptorch.ShardedExecution("B1", "B2", "B3", "B4"))
    with poptorch.inferenceModel(model, options) as inference:
        assert torch.equal(inference(data(4)[0]), plain)
    assert not torch.equal(expected, plain)


@pytest.mark.parametrize(
    ("refuse", "message"),
    [
        (lambda o: o.anchorTensor("a", "b"), "anchorTensor is not supported: return the value"),
        (lambda o: o.enableSyntheticData(True), "enableSyntheticData is not supported"),
        (lambda o: o.useOfflineIpuTarget(), "useOfflineIpuTarget is not supported"),
        (lambda o: o.Precision.enableFloatingPointExceptions(True), "set_detect_anomaly"),
        (lambda o: o.Distributed.configureProcessId(1, 2), r"penstock\.Mesh\(data=…\)"),
        (
            lambda o: o.TensorLocations.setAccumulatorLocation(OFF_CHIP),
            "gradients cannot be stored in host memory",
        ),
    ],
)
def test_settings_that_would_change_results_are_refused(refuse: Any, message: str) -> None:
    with pytest.raises(poptorch.Error, match=message):
        refuse(poptorch.Options())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda o: o.deviceIterations(0), "deviceIterations must be a whole number of at least 1, got 0"),
        (lambda o: o.replicationFactor(True), "replicationFactor must be"),
        (lambda o: o.Training.gradientAccumulation(1.5), "gradientAccumulation must be"),
        (lambda o: o.outputMode(poptorch.OutputMode.EveryN), "EveryN output_mode must have output_return_period set"),
        (lambda o: o.outputMode("All"), "an output mode is a poptorch.OutputMode"),
        (lambda o: o.setExecutionStrategy("B1"), "a strategy is a poptorch.PipelinedExecution"),
        (lambda o: o.randomSeed("x"), "a seed is a whole number"),
        (lambda o: o.TensorLocations.setOptimizerLocation(False), "a location is a poptorch.TensorLocationSettings"),
        (
            lambda o: o.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.NoReduction),
            "must be Mean or Sum",
        ),
    ],
)
def test_assertion_errors(wrong: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        wrong(poptorch.Options())


def test_popart_settings_without_effect_warn() -> None:
    with pytest.warns(UserWarning, match=r"_Popart.set\('engineOptions', …\) has no effect"):
        poptorch.Options()._Popart.set("engineOptions", {})


def test_too_few_micro_batches_warn() -> None:
    model = made(Net)
    options = poptorch.Options().setExecutionStrategy(STAGES)
    options.Training.gradientAccumulation(6)
    message = r"depth \(gradient accumulation factor\) must equal at least the number of pipeline stages \(7\)"
    with poptorch.trainingModel(model, options) as training, pytest.warns(UserWarning, match=message) as seen:
        training(*data(12))
    assert seen[0].filename == __file__
    options = poptorch.Options().setExecutionStrategy(STAGES).deviceIterations(3)
    message = r"device iterations.*\(4\)"
    with poptorch.inferenceModel(model, options) as inference, pytest.warns(UserWarning, match=message):
        inference(data(6)[0])
