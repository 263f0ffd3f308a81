"""Which steps an attachment takes, as a table: the mode in the record selects the row.

A mode is the device's kind. A capability that changes what is done to an attachment adds a row or a step here, never a
branch inside a step. Read by `control.attach.service` and `control.attach.ending`. Pure data.
"""

from collections.abc import Mapping

from podwire.control.attach import steps
from podwire.control.attach.steps import Step

RECIPES: Mapping[str, tuple[Step, ...]] = {
    # The guard row comes before the device, so that no packet ever meets a device without a row that drops it; the
    # regeneration comes after all of that, so that the first packet that passes meets the whole policy; the host's
    # ports come last, so that whoever asks one meets a pod that answers.
    "veth": (
        steps.GUARD,
        steps.DEVICE,
        steps.POD_NETWORK,
        steps.SHAPING,
        steps.IDENTITY,
        steps.REGENERATION,
        steps.HOST_PORTS,
    ),
}
