"""What benchmarks by name add: `--classes cifar10`, `--benchmark flickr30k`, and these as data sets."""

_NAMED = "mm_utils.extras.benchmarks.named"
CLASS_BENCHMARKS = dict.fromkeys(
    (
        *("imagenet1k", "cifar10", "cifar100", "food101", "oxford_pets", "flowers102", "dtd", "eurosat", "stl10"),
        *("mnist", "svhn"),
    ),
    f"{_NAMED}.classes_of",
)
"""By name, what returns the `Benchmark` with its classes, its prompts and its data."""
NAMED_SOURCES = dict.fromkeys(("coco_karpathy", "flickr30k", "flickr8k"), f"{_NAMED}.named_source")
"""By name, what returns the source that holds the data which a `Source` names."""
