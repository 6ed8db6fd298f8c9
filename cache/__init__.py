# SPDX-License-Identifier: Apache-2.0
"""The paged KV cache of the streaming model. Imported as `lingbot_map_ros.cache`."""
from lingbot_map_ros.cache.kv_cache import FlashInferKVCacheManager
from lingbot_map_ros.cache.token_store import CACHE_DTYPES, check_cache_dtype

__all__ = ["CACHE_DTYPES", "FlashInferKVCacheManager", "check_cache_dtype"]
