from ops import relu
from ops.module import Holder

import torch.nn as nn


class ModelNew(Holder):
    def forward(self, x):
        return relu(x)
