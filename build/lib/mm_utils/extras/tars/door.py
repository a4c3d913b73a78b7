"""What tar shards add: a format of sources, of a file, a folder or a pattern such as shard-{000..099}.tar."""

SOURCES = {"webdataset": "mm_utils.extras.tars.webdataset.read_webdataset"}
