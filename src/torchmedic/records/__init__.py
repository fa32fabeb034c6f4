"""Every record that crosses a stage or touches the disk, one module per subject. Nothing here imports torch."""

from torchmedic.records.report import PHASES as PHASES
from torchmedic.records.report import SCHEMA as SCHEMA
from torchmedic.records.report import BoxContents as BoxContents
from torchmedic.records.report import Diagnosis as Diagnosis
from torchmedic.records.report import Fault as Fault
from torchmedic.records.report import Grade as Grade
from torchmedic.records.report import Location as Location
from torchmedic.records.report import Moment as Moment
from torchmedic.records.report import Outcome as Outcome
from torchmedic.records.report import Phase as Phase
from torchmedic.records.report import RankEnd as RankEnd
from torchmedic.records.report import Report as Report
from torchmedic.records.report import Role as Role
from torchmedic.records.report import Safety as Safety
from torchmedic.records.report import Severity as Severity
from torchmedic.records.report import SignalOrigin as SignalOrigin
from torchmedic.records.report import StackFrame as StackFrame
from torchmedic.records.report import ThreadStack as ThreadStack
from torchmedic.records.report import Treatment as Treatment
from torchmedic.records.report import WorkerFailure as WorkerFailure
from torchmedic.records.report import encode as encode
from torchmedic.records.report import encode_line as encode_line
