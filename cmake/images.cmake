# Device code inside the library. clang compiles src/device/cuda/code/kernels.cu to PTX once, which drivers compile for the GPU that is there; ptxas makes machine code of
# it for each architecture beforehand. All of it becomes arrays of bytes in place of src/device/cuda/driver/images.c, which has none. nvcc's own front end takes functions that
# say nothing for the host's, and refuses what the kernels share with the host.
#
#   cmake -D OUTPUT=file.c -D "IMAGES=compute=file;..." [-D LZ4=program] -P images.cmake    writes the table

set(images_script ${CMAKE_CURRENT_LIST_FILE})

# The assembler: the one that is named, or of the Python index, or whichever is found, or none.
function(halfstep_find_ptxas)
  if(HALFSTEP_PTXAS)
    return()
  endif()
  execute_process(COMMAND bash ${PROJECT_SOURCE_DIR}/scripts/ptxas.sh ${PROJECT_BINARY_DIR}/ptxas
    OUTPUT_VARIABLE found ERROR_QUIET RESULT_VARIABLE error OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(NOT error)
    set(HALFSTEP_PTXAS ${found} CACHE FILEPATH "Assembler of device code" FORCE)
    return()
  endif()
  find_program(HALFSTEP_PTXAS ptxas HINTS ENV CUDA_HOME ENV CUDA_PATH PATH_SUFFIXES bin DOC "Assembler of device code")
  if(NOT HALFSTEP_PTXAS)
    message(WARNING "no ptxas, and none to be had from the Python index: drivers will compile the device code when it is first used")
    return()
  endif()
  execute_process(COMMAND ${HALFSTEP_PTXAS} --version OUTPUT_VARIABLE text)
  string(REGEX MATCH "release ([0-9.]+)" text "${text}")
  if(CMAKE_MATCH_1 VERSION_LESS 12.8)
    message(FATAL_ERROR "${HALFSTEP_PTXAS} is of ${CMAKE_MATCH_1}; for ${HALFSTEP_CUDA_ARCHITECTURES} it has to be 12.8 or newer")
  elseif(CMAKE_MATCH_1 VERSION_GREATER_EQUAL 13)
    message(WARNING "${HALFSTEP_PTXAS} is of ${CMAKE_MATCH_1}: drivers of CUDA 12 will not load its code, and compile the PTX when it is first used")
  endif()
endfunction()

# Makes PTX of a source: what drivers compile, and tests translate.
function(halfstep_ptx output source)
  add_custom_command(OUTPUT ${output}
    COMMAND ${HALFSTEP_CLANG} -x cuda --cuda-device-only --cuda-gpu-arch=sm_${HALFSTEP_CUDA_PTX} -nocudainc -nocudalib -Xclang -target-feature
            -Xclang +ptx74 -ffp-contract=off -std=c++17 -O2 -Wno-everything -I${PROJECT_SOURCE_DIR}/src -I${PROJECT_SOURCE_DIR}/include
            -MD -MF ${output}.d -MT ${output} -S -o ${output} ${source}
    DEPENDS ${source} DEPFILE ${output}.d)
endfunction()
# The least compute capability, of which the PTX is.
set(HALFSTEP_CUDA_PTX 80)

function(halfstep_device_images result)
  set(HALFSTEP_CUDA_ARCHITECTURES 120 100 90 89 86 80 CACHE STRING "Architectures that get machine code, newest first")
  set(source ${PROJECT_SOURCE_DIR}/src/device/cuda/code/kernels.cu)
  set(output ${PROJECT_BINARY_DIR}/cuda_images.c)
  set(images "")
  set(files "")
  set(${result} ${PROJECT_SOURCE_DIR}/src/device/cuda/driver/images.c PARENT_SCOPE)
  if(HALFSTEP_CUDA)
    find_program(HALFSTEP_CLANG clang DOC "Compiler of device code")
    find_program(HALFSTEP_LZ4 lz4 DOC "Packs device code, which is three times as large without")
    mark_as_advanced(HALFSTEP_CLANG HALFSTEP_LZ4 HALFSTEP_PTXAS)
    if(NOT HALFSTEP_CLANG)
      message(FATAL_ERROR "HALFSTEP_CUDA=ON but clang was not found")
    endif()
    halfstep_find_ptxas()
    set(ptx ${PROJECT_BINARY_DIR}/kernels.ptx)
    halfstep_ptx(${ptx} ${source})
    if(HALFSTEP_PTXAS)
      foreach(architecture IN LISTS HALFSTEP_CUDA_ARCHITECTURES)
        set(cubin ${PROJECT_BINARY_DIR}/kernels.sm_${architecture}.cubin)
        add_custom_command(OUTPUT ${cubin} COMMAND ${HALFSTEP_PTXAS} -arch=sm_${architecture} --fmad=false -o ${cubin} ${ptx} DEPENDS ${ptx})
        list(APPEND images ${architecture}=${cubin})
        list(APPEND files ${cubin})
      endforeach()
    endif()
    list(APPEND images 0=${ptx})
    list(APPEND files ${ptx})
    add_custom_command(OUTPUT ${output}
      COMMAND ${CMAKE_COMMAND} -D OUTPUT=${output} -D "IMAGES=${images}" -D "LZ4=${HALFSTEP_LZ4}" -P ${images_script}
      DEPENDS ${files} ${images_script} VERBATIM)
    set(${result} ${output} PARENT_SCOPE)
  endif()
endfunction()

if(CMAKE_SCRIPT_MODE_FILE)
  set(arrays "")
  set(rows "")
  foreach(image IN LISTS IMAGES)
    string(REGEX MATCH "^([0-9]+)=(.*)$" image "${image}")
    set(compute ${CMAKE_MATCH_1})
    set(file "${CMAKE_MATCH_2}")
    # PTX is a text, which ends with a 0.
    file(SIZE "${file}" bytes)
    math(EXPR bytes "${bytes} + 1")
    if(LZ4)
      execute_process(COMMAND bash -c "{ cat \"$0\"; printf '\\0'; } | \"$1\" -q -9 -B7 -BD --no-frame-crc >\"$2\"" "${file}" "${LZ4}" "${file}.lz4"
        RESULT_VARIABLE error)
      if(error)
        message(FATAL_ERROR "${LZ4} failed with ${file}")
      endif()
      file(READ "${file}.lz4" data HEX)
    else()
      file(READ "${file}" data HEX)
      string(APPEND data 00)
    endif()
    string(REGEX REPLACE "(..)" "0x\\1," data "${data}")
    string(APPEND arrays "static const _Alignas(64) unsigned char image_${compute}[] = {${data}};\n")
    string(APPEND rows "    {${compute}, image_${compute}, ${bytes}, sizeof image_${compute}},\n")
  endforeach()
  file(WRITE "${OUTPUT}" "#include \"device/cuda/driver/images.h\"\n${arrays}const struct hstep_cuda_image hstep_cuda_images[] = {\n${rows}    {0, 0, 0, 0}};\n")
endif()
