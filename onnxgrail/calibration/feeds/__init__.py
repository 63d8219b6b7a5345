"""Calibration data: conversion of files, arrays and iterables to feeds of a model."""
