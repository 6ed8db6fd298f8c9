# SPDX-License-Identifier: Apache-2.0
"""The paged KV cache of the streaming model. Imported as `lingbot_map_ros.cache`."""
from lingbot_map_ros.cache.kv_cache import FlashInferKVCacheManager

__all__ = ["FlashInferKVCacheManager"]
