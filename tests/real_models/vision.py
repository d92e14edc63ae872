"""Models of timm, small, in training: batch norms read and write their statistics."""

from __future__ import annotations

from typing import Any

from tests.real_models.case import Built, Case, Sizes, images
from tests.torchvision_stand_in import import_timm


def timm(architecture: str, **more: Any) -> Any:
    """Return a builder of a model by timm's name; a callable option gets the sizes."""

    def build(s: Sizes, attention: str) -> Built:
        package: Any = import_timm()
        options = {key: value(s) if callable(value) else value for key, value in more.items()}
        return package.create_model(architecture, num_classes=s.classes, **options), (images(s),), {}

    return build


_PATCHES = {"img_size": lambda s: s.image, "embed_dim": lambda s: s.hidden}
_MOBILE = [["ds_r1_k3_s1_e1_c8"], ["ir_r1_k3_s2_e4_c12_se0.25"]]


def efficientnet(s: Sizes, attention: str) -> Built:
    """Build an EfficientNet of two stages: depthwise convolutions, squeeze and excite, batch norms."""
    package: Any = import_timm("timm.models.efficientnet")
    builder: Any = import_timm("timm.models._efficientnet_builder")
    model = package.EfficientNet(builder.decode_arch_def(_MOBILE), num_classes=s.classes, num_features=24, stem_size=8)
    return model, (images(s),), {}


def mixer(s: Sizes, attention: str) -> Built:
    """Build an MLP-Mixer: products over the patches, and over the channels."""
    package: Any = import_timm("timm.models.mlp_mixer")
    model = package.MlpMixer(num_classes=s.classes, img_size=s.image, patch_size=4, num_blocks=1, embed_dim=s.hidden)
    return model, (images(s),), {}


CASES = {
    "ViT": Case(timm("vit_tiny_patch16_224", **_PATCHES, patch_size=4, depth=1, num_heads=lambda s: s.heads)),
    "ResNet": Case(timm("resnet10t", stem_width=8, channels=(8, 12, 16, 24))),
    "ConvNeXt": Case(timm("convnext_atto", patch_size=1, depths=(1, 1, 1, 1), dims=(8, 8, 12, 12))),
    "MLP-Mixer": Case(mixer),
    "EfficientNet": Case(efficientnet),
    "Swin": Case(timm("swin_tiny_patch4_window7_224", img_size=lambda s: s.image, patch_size=2, window_size=2, embed_dim=24,
                      depths=(2,), num_heads=(3,), drop_path_rate=0.0)),
}  # fmt: skip
