"""The classifier of images: YAML ``model.classifier``."""

from typing import Annotated, ClassVar

from pydantic import Field

from trainer.config.schema.fields import VOCABULARY, WIDTH, Section, setting


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

    @property
    def sizes(self) -> tuple[int, ...]:
        """Returns the input width of the first layer, and the output width of each layer."""
        return (self.pixels, *self.hidden_sizes, self.classes)

    @property
    def labels_per_sequence(self) -> int:
        """Returns 1: an image has one label."""
        return 1

    @property
    def labels_text(self) -> str:
        """Returns the name of the items with labels, in the plural."""
        return "images"

    @property
    def sequences_text(self) -> str:
        """Returns the name of the sequences, in the plural."""
        return "images"
