"""One thread a process: the tests run side by side, and results must not depend on who else is running."""

import torch

torch.set_num_threads(1)
