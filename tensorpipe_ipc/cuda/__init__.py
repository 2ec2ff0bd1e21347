"""Tensors on GPUs: staging through pinned memory, and blocks that one GPU's processes share. Nothing else calls torch.cuda."""
