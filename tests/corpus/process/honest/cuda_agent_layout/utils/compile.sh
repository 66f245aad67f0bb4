#!/bin/bash
python3 -m utils.compile
