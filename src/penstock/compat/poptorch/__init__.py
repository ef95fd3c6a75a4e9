"""PopTorch programs on Penstock: ``import penstock.compat.poptorch as poptorch``.

IPU n is device n, modulo what there is: CUDA devices, or else the CPU for all. Models are called as PopTorch's are,
with ``micro-batch × gradientAccumulation × deviceIterations × replicationFactor`` samples, and return what the output
mode says, on the host. docs/migrating.md tells what is different, and which options are accepted and have no effect.
"""

from penstock.compat.poptorch import enums as enums
from penstock.compat.poptorch import optim as optim
from penstock.compat.poptorch import options as options
from penstock.compat.poptorch.annotations import BeginBlock as BeginBlock
from penstock.compat.poptorch.annotations import Block as Block
from penstock.compat.poptorch.annotations import BlockFunction as BlockFunction
from penstock.compat.poptorch.annotations import removeBlocks as removeBlocks
from penstock.compat.poptorch.enums import AnchorMode as AnchorMode
from penstock.compat.poptorch.enums import AutoStage as AutoStage
from penstock.compat.poptorch.enums import ConnectionType as ConnectionType
from penstock.compat.poptorch.enums import DataLoaderMode as DataLoaderMode
from penstock.compat.poptorch.enums import HalfFloatCastingBehavior as HalfFloatCastingBehavior
from penstock.compat.poptorch.enums import Liveness as Liveness
from penstock.compat.poptorch.enums import MeanReductionStrategy as MeanReductionStrategy
from penstock.compat.poptorch.enums import OutputMode as OutputMode
from penstock.compat.poptorch.enums import ReductionType as ReductionType
from penstock.compat.poptorch.enums import SharingStrategy as SharingStrategy
from penstock.compat.poptorch.enums import SyncPattern as SyncPattern
from penstock.compat.poptorch.errors import Error as Error
from penstock.compat.poptorch.executor import PoplarExecutor as PoplarExecutor
from penstock.compat.poptorch.executor import inferenceModel as inferenceModel
from penstock.compat.poptorch.executor import trainingModel as trainingModel
from penstock.compat.poptorch.hardware import ipuHardwareIsAvailable as ipuHardwareIsAvailable
from penstock.compat.poptorch.hardware import ipuHardwareVersion as ipuHardwareVersion
from penstock.compat.poptorch.hardware import isRunningOnIpu as isRunningOnIpu
from penstock.compat.poptorch.hardware import setLogLevel as setLogLevel
from penstock.compat.poptorch.loader import AsynchronousDataAccessor as AsynchronousDataAccessor
from penstock.compat.poptorch.loader import DataLoader as DataLoader
from penstock.compat.poptorch.losses import identity_loss as identity_loss
from penstock.compat.poptorch.losses import recomputationCheckpoint as recomputationCheckpoint
from penstock.compat.poptorch.options import Options as Options
from penstock.compat.poptorch.options import TensorLocationSettings as TensorLocationSettings
from penstock.compat.poptorch.saving import load as load
from penstock.compat.poptorch.strategies import ParallelPhasedExecution as ParallelPhasedExecution
from penstock.compat.poptorch.strategies import Phase as Phase
from penstock.compat.poptorch.strategies import PhasedExecution as PhasedExecution
from penstock.compat.poptorch.strategies import PipelinedExecution as PipelinedExecution
from penstock.compat.poptorch.strategies import SerialPhasedExecution as SerialPhasedExecution
from penstock.compat.poptorch.strategies import ShardedExecution as ShardedExecution
from penstock.compat.poptorch.strategies import Stage as Stage
