"""Microbenchmarks: `fastdecode bench NAME`. Each prints its baseline beside our figure."""
