"""Converts one image with Pillow, from bytes to bytes, without storage or Beam. Start reading at `codec`."""

from beam_pipeline.images.codec import FLAG_NAMES as FLAG_NAMES
from beam_pipeline.images.codec import FORMATS as FORMATS
from beam_pipeline.images.codec import SUBSAMPLING as SUBSAMPLING
from beam_pipeline.images.codec import ChannelSums as ChannelSums
from beam_pipeline.images.codec import EncodedImage as EncodedImage
from beam_pipeline.images.codec import ImageOptions as ImageOptions
from beam_pipeline.images.codec import SourceInfo as SourceInfo
from beam_pipeline.images.codec import check_size as check_size
from beam_pipeline.images.codec import codec_versions as codec_versions
from beam_pipeline.images.codec import convert as convert
from beam_pipeline.schema.table import PASSTHROUGH as PASSTHROUGH
