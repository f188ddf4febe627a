"""fairseq-train whose DistributedDataParallel gets no device ids, so that it runs on CPUs."""

import runpy

from fairseq.models import distributed_fairseq_model
from torch.nn.parallel import DistributedDataParallel


class WithoutDeviceIds(DistributedDataParallel):
    """torch's own, on whatever device the model is."""

    def __init__(self, *args, device_ids, output_device, **options):
        super().__init__(*args, **options)


if __name__ == "__main__":
    distributed_fairseq_model.DistributedDataParallel = WithoutDeviceIds
    # anew, since it sets up its log when it is run
    runpy.run_module("fairseq_cli.train", run_name="__main__")
