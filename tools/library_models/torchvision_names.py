"""For a torchvision whose binary is for another build of torch: models need none of its operators, only two names."""

import torch

if not hasattr(torch.ops.torchvision, "nms"):
    torch.library.define("torchvision::nms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    torch.library.define("torchvision::qnms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
