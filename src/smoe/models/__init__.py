"""Models: their structure comes from transformers, their experts do not come at all until they are needed."""
