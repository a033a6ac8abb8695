"""The classifier of images: YAML ``model.classifier``."""

from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field

from trainer.config.schema.fields import VOCABULARY, WIDTH, Section, setting

ImagesType: TypeAlias = Literal["MnistDataset"]
IMAGES = "MnistDataset"
"""The `data_loader.type` of images: the name of MindSpore's data set of the same file format."""
CLASSIFIER = "MlpClassifier"
"""The value of ``model.arch.type`` that selects the classifier of images instead of a decoder."""


class ClassifierConfig(Section):
    """Fully connected layers with ReLU between them, for images (YAML ``model.classifier``).

    The defaults are the network of MindSpore's tutorial on gradient accumulation, and the pixels of its digits.
    """

    pixels: int = setting(784, "Pixels of an image. Default 784: 28 x 28.", ge=1, le=WIDTH)
    hidden_sizes: list[Annotated[int, Field(ge=1, le=WIDTH)]] = setting(
        [512, 512], "Width of each hidden layer.", min_length=1)
    classes: int = setting(10, "Kinds of images; labels are 0 to one less.", ge=2, le=VOCABULARY)
    pixel_mean: float = setting(0.1307, "Mean of the pixels, which are from 0 to 1.", ge=0, le=1)
    pixel_std: float = setting(0.3081, "Standard deviation of the pixels.", gt=0, le=1)
    initializer_range: float = setting(
        0.01, "Standard deviation of new weights; 0.01 is MindSpore's weight_init \"normal\".", gt=0)

    # Only a decoder has these.
    experts: ClassVar[None] = None
    moe_layers: ClassVar[tuple[int, ...]] = ()
    has_loss_terms: ClassVar[bool] = False
    norm_offset: ClassVar[int] = 0
    param_init_std_rules: ClassVar[tuple[Any, ...]] = ()

    labels_per_sequence: ClassVar[int] = 1
    labels_text: ClassVar[str] = "images"
    sequences_text: ClassVar[str] = "images"

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Returns the fully connected layers by name, as in MindSpore's tutorial: outputs and inputs of each."""
        sizes = (self.pixels, *self.hidden_sizes, self.classes)
        pairs = zip(sizes[1:], sizes, strict=False)
        return {f"dense_relu_sequential.{2 * layer}": pair for layer, pair in enumerate(pairs)}

    @property
    def numbers_per_label(self) -> int:
        """Returns how many numbers an image has: its pixels, and the outputs of all layers."""
        return self.pixels + sum(self.hidden_sizes) + self.classes
